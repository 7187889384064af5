"""Table T2: edits are what they say, wrong tokens are seen, and the page says what the record says."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.suite import similarity, tables
from benchmarks.suite.edits import documents, edited, reworded
from benchmarks.suite.similarity import REWORDED, UNRELATED, SimilaritySettings, first_prompt, variants, wrong_tokens

from kvgraft.errors import ConfigError


@pytest.fixture(scope="module")
def drawn():
    return documents(2, 6, seed=0)


def sentences(document):
    return [sentence for passage in document.passages for sentence in passage.sentences]


def test_documents_depend_on_the_seed_and_share_nothing(drawn):
    assert documents(2, 6, seed=0) == drawn
    assert documents(2, 6, seed=1) != drawn
    assert not {each.name for each in drawn[0].passages} & {each.name for each in drawn[1].passages}


def test_more_documents_than_there_are_descriptions_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="ask for fewer"):
        documents(1_000, 1_000, seed=0)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5])
def test_an_edit_changes_the_share_that_it_names_and_not_the_passage_that_is_asked_about(drawn, share):
    document, stock = drawn
    changed, real = edited(document, share, stock, 2, random.Random(0))
    differing = sum(here != there for here, there in zip(sentences(document), sentences(changed), strict=True))
    assert differing == round(real * document.num_sentences)
    assert real == pytest.approx(share, abs=1 / document.num_sentences)
    assert bool(real) == bool(share)
    assert changed.passages[2] == document.passages[2]


def test_a_reworded_document_has_no_four_words_in_a_row_of_the_first(drawn):
    before, after = (text.split() for text in (drawn[0].text, reworded(drawn[0]).text))
    rows = {tuple(before[start : start + 4]) for start in range(len(before))}
    kept = [row for start in range(len(after) - 3) if (row := tuple(after[start : start + 4])) in rows]
    assert not kept


def test_every_variant_asks_about_the_same_passage_behind_another_instruction(drawn):
    settings = SimilaritySettings()
    found = variants(*drawn, settings, number=3)
    assert [each.name for each in found] == list(settings.variants)
    beginning = first_prompt(drawn[0]).split("\n\n")[0]
    for each in found:
        request = each.request(3)
        assert not request.prompt.startswith(beginning)
        assert request.answers[0] == each.document.passages[each.passage].name
        assert (each.edited_share is None) == (each.name in (REWORDED, UNRELATED))


def test_wrong_tokens_are_counted_where_the_prompt_has_others_than_the_donor():
    span = SimpleNamespace(target_start=2, donor_start=1, length=3)
    report = SimpleNamespace(spans=(span,))
    donor = np.array([9, 1, 2, 3, 9])
    assert wrong_tokens(report, np.array([7, 7, 1, 2, 3, 7]), donor) == 0
    assert wrong_tokens(report, np.array([7, 7, 1, 8, 8, 7]), donor) == 2


def record(number, **on):
    figures = {"mean_kl": 0.25, "first_flip": 0.0, "greedy_equal": 1.0}
    reuse = {"exact_tokens": 10, "shifted_tokens": 70, "is_grafted": True}
    scores = {"task": 0.5, "contains": 1.0}
    times = {mode: {"wall": [seconds, seconds], "cpu": [9.0]} for mode, seconds in (("off", 2.0), ("graft", 0.5))}
    return {
        "suite": "5%",
        "index": number,
        "off": scores,
        "on": scores | figures | reuse | on,
        "times": times,
        "tokens": 100,
        "bound_tokens": 90,
        "wrong_tokens": 0,
        "cosine": 0.98,
        "edited_share": 0.048,
    }


def row(name, *records):
    return similarity._row(name, records, SimilaritySettings())


def test_a_row_counts_tokens_and_takes_times_of_the_clock_that_is_asked_for():
    found = row("5%", record(0), record(1, shifted_tokens=50, mean_kl=0.75))
    assert found["reused_share"] == pytest.approx(0.7)
    assert found["bound_share"] == pytest.approx(0.9)
    assert found["speedup_ratio"] == pytest.approx(4.0)
    assert (found["off_ms"], found["on_ms"]) == (2_000.0, 500.0)
    assert (found["mean_kl"], found["score_on"], found["hits"]) == (0.5, 0.5, 2)
    assert (found["mean_kl_low"], found["mean_kl_high"]) == (0.25, 0.75)
    assert (found["score_difference"], found["score_difference_low"]) == (0.0, 0.0)


def test_the_page_has_a_line_per_row_with_claims_beside_it_and_names_what_is_missing():
    unrelated = record(0, exact_tokens=0, shifted_tokens=0, is_grafted=False) | {"edited_share": None}
    rows = [row("20%", record(0)), row(UNRELATED, unrelated)]
    lines = "\n".join(render({"rows": rows}) for render in tables.similarity.BLOCKS.values()).splitlines()
    assert any(line.startswith("| 4.8 % | 1 | 0.980 | 90.0 % | 80.0 % | 0 | 4.00x") for line in lines)
    assert any(line.startswith("| another document (negative control) |") and "| 0.0 % |" in line for line in lines)
    assert any(line.startswith("| `partial_60` |") and line.endswith("| not measured |") for line in lines)
