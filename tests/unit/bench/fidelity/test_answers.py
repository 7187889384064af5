"""Scores of answers, by hand."""

from __future__ import annotations

import pytest

from kvgraft.bench.fidelity.answers import contains, denies, f1, is_stale, normalised, value


def test_case_punctuation_and_articles_do_not_count():
    assert normalised("The  Cat, an animal.") == ["cat", "animal"]
    assert f1("the Cat!", ["cat"]) == 1


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("a cat sat", ["cat"], 2 * 1 / (2 + 1)),
        ("cat cat", ["cat dog"], 2 * 1 / (2 + 2)),
        ("dog", ["cat"], 0),
        ("dog", ["cat", "a dog"], 1),
        ("", ["cat"], 0),
        ("", ["the"], 1),
    ],
)
def test_f1(answer, right, score):
    assert f1(answer, right) == pytest.approx(score)


def test_contains_takes_whole_words_in_order():
    assert contains("It was the Big Ben tower", ["big ben"]) == 1
    assert contains("Ben is big", ["big ben"]) == 0
    assert contains("it is 308 points", ["30"]) == 0
    assert contains("anything", [""]) == 0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The passage does not mention who won.", 1),
        ("I don't know.", 1),
        ("It is not specified in the text", 1),
        ("There is no information about that", 1),
        ("Nothing was known of it but the name, Ada", 0),
        ("They scored 308 points, not 247", 0),
        ("", 0),
    ],
)
def test_an_answer_denies_the_content(answer, score):
    assert denies(answer) == score


@pytest.mark.parametrize(
    ("answer", "score"), [("<42527>.", 1), ("4252", 0), ("is 42527, not 3", 1), ("3, then 42527", 0), ("", 0)]
)
def test_a_value_is_the_first_number(answer, score):
    assert value(answer, ["42527"]) == score


def test_stale_is_the_other_text_s_answer_and_not_the_right_one():
    assert is_stale("308 points", ["247"], ["308"]) == 1
    assert is_stale("247 points", ["247"], ["308"]) == 0
    assert is_stale("not 308 but 247", ["247"], ["308"]) == 0
    assert is_stale("no idea", ["247"], ["308"]) == 0
