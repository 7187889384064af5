"""Bad words as tokens: with and without the space in front of them."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from kvgraft.engine.sampling.bad_words import bad_token_ids
from kvgraft.errors import ConfigError
from kvgraft.models import bundled_model_path


class LongestMatch:
    """A tokenizer that takes the longest of its tokens; bytes without a token have none."""

    tokens = (" fool", " ", "fool", "cat", " ca", "t", "sly", "s", "l", "y", " sl", "\n")

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        ids = []
        while text:
            fits = [token for token in self.tokens if text.startswith(token)]
            if fits:
                ids.append(self.tokens.index(max(fits, key=len)))
            text = text[len(max(fits, key=len)) if fits else 1 :]
        return {"input_ids": ids}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("fool", ((2,), (0,))),
        ("  fool", ((2,), (0,))),
        ("cat", ((3,), (4, 5))),
        ("sly", ((6,), (10, 9))),
        ("y", ((9,),)),
        ("\n", ((11,),)),
    ],
    ids=["own token", "leading space", "cut elsewhere", "more tokens", "space is a token", "white space"],
)
def test_a_word_is_banned_in_both_forms_as_far_as_they_differ(word, expected):
    assert bad_token_ids(LongestMatch(), [word]) == expected


def test_each_sequence_is_named_once():
    assert bad_token_ids(LongestMatch(), ["fool", " fool", "y", "fool"]) == ((2,), (0,), (9,))
    assert bad_token_ids(LongestMatch(), []) == ()


def test_the_tokens_spell_the_word():
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    found = bad_token_ids(tokenizer, ["return", "naïve café"])
    assert {tokenizer.decode(ids) for ids in found} <= {"return", " return", "naïve café", " naïve café"}
    assert len(found) > 1


@pytest.mark.parametrize(
    ("word", "said"),
    [("", "not empty"), (5, "not 5"), ("\ud800", "cannot be tokenised"), ("x", "has no tokens")],
)
def test_what_is_no_word_is_refused(word, said):
    tokenizer = LongestMatch() if word != "\ud800" else AutoTokenizer.from_pretrained(bundled_model_path())
    with pytest.raises(ConfigError, match=said):
        bad_token_ids(tokenizer, [word])


def test_without_a_tokenizer_there_are_no_words():
    with pytest.raises(ConfigError, match="give bad_token_ids"):
        bad_token_ids(None, ["x"])
