"""Text as it comes, token by token, with the bundled tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvgraft.engine.requests.text import OutputText
from kvgraft.models import bundled_model_path


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model_path())


def push_all(tokenizer, text, stop=()):
    output = OutputText(tokenizer, stop)
    parts = [output.push(token) for token in tokenizer(text)["input_ids"]]
    return output, [*parts, output.flush()]


@pytest.mark.parametrize("text", ["def f(x):\n    return x + 1\n", "naïve café — 你好 🙂", "a", ""])
def test_parts_add_up_to_the_text(tokenizer, text):
    output, parts = push_all(tokenizer, text)
    assert "".join(parts) == output.text == text


def test_stop_text_is_cut_off_and_never_streamed(tokenizer):
    output, parts = push_all(tokenizer, "one two three four", stop=("thr", "four"))
    assert output.stopped
    assert "".join(parts) == output.text == "one two "


@pytest.mark.parametrize(("stop", "expected"), [(("thr", "four"), "one two thr"), (("two thr", "two"), "one two")])
def test_stop_text_is_left_in_if_it_is_to_be(tokenizer, stop, expected):
    output = OutputText(tokenizer, stop, include_stop=True)
    parts = [output.push(token) for token in tokenizer("one two three four")["input_ids"]]
    assert output.stopped
    assert "".join([*parts, output.flush()]) == output.text == expected


def test_stop_text_among_the_first_tokens_does_not_count(tokenizer):
    ids = tokenizer("a b a b a b a b")["input_ids"]
    for min_tokens in range(len(ids)):
        output = OutputText(tokenizer, ("b",), min_tokens=min_tokens)
        parts = [*(output.push(token) for token in ids), output.flush()]
        seen, rest = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:min_tokens], ids[min_tokens:]))
        assert "".join(parts) == output.text == seen + rest.partition("b")[0]
        assert output.stopped == ("b" in rest)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_special_tokens_are_told_if_they_are_to_be(tokenizer, kind, rng):
    tokenizer = tokenizer if kind == "byte_level" else byte_fallback_tokenizer()
    special = tokenizer.eos_token_id
    for _ in range(100):
        ids = random_ids(rng, tokenizer)
        ids[len(ids) // 2] = special
        output = OutputText(tokenizer, (), skip_special_tokens=False)
        parts = [output.push(token) for token in ids] + [output.flush()]
        assert "".join(parts) == output.text == tokenizer.decode(ids, skip_special_tokens=False), ids
        assert tokenizer.eos_token in output.text


def test_beginning_of_a_stop_text_is_held_back_until_it_is_certain(tokenizer):
    output, parts = push_all(tokenizer, "say hello world", stop=("hello there",))
    assert not output.stopped
    assert "".join(parts) == "say hello world"
    assert all("hello" not in "".join(parts[:i]) for i in range(3))


def test_without_a_tokenizer_there_is_no_text():
    output = OutputText(None, ("x",))
    assert output.push(5) == ""
    assert not output.stopped


def byte_fallback_tokenizer():
    """As SentencePiece models have it: characters without a token come as bytes; a broken run of these turns to U+FFFD."""
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁hello",
        "a",
        "▁a",
        "lo",
        "é",
        "▁▁",
        "你",
        "</s>",
    ]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def random_ids(rng, tokenizer):
    """Half of them single bytes, so that most characters are broken."""
    some = rng.integers(0, min(260, len(tokenizer)), 12)
    return np.where(rng.random(12) < 0.5, some, rng.integers(0, len(tokenizer), 12))[: rng.integers(1, 13)].tolist()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_parts_add_up_to_what_the_tokenizer_decodes(tokenizer, kind, rng):
    """Incomplete characters at the end were lost, and a broken run of bytes failed the request."""
    tokenizer = tokenizer if kind == "byte_level" else byte_fallback_tokenizer()
    for _ in range(1_000):
        ids = random_ids(rng, tokenizer)
        output = OutputText(tokenizer, ())
        parts = [output.push(token) for token in ids] + [output.flush()]
        assert "".join(parts) == output.text == tokenizer.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize("ids", [[228], [68, 228], [228, 189], [228, 189, 160]])
def test_incomplete_character_at_the_end_is_told(tokenizer, ids):
    byte_tokens = {0xE4: "ä", 0xBD: "½", 0xA0: "ł"}
    ids = [tokenizer.convert_tokens_to_ids(byte_tokens.get(i, chr(i))) for i in ids]
    output = OutputText(tokenizer, ())
    parts = [output.push(token) for token in ids]
    expected = tokenizer.decode(ids)
    assert "".join([*parts, output.flush()]) == output.text == expected
    assert all("\ufffd" not in part for part in parts)


def test_stop_text_is_found_in_what_the_end_makes_certain():
    tokenizer = byte_fallback_tokenizer()
    output = OutputText(tokenizer, ("!",))
    ids = tokenizer.convert_tokens_to_ids(["a", "<0x41>", "<0x21>", "<0x42>"])
    assert "".join([*(output.push(token) for token in ids), output.flush()]) == output.text == "aA"
