"""Text as it comes, token by token, with the bundled tokenizer."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from kvgraft.engine.text import OutputText
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


def test_beginning_of_a_stop_text_is_held_back_until_it_is_certain(tokenizer):
    output, parts = push_all(tokenizer, "say hello world", stop=("hello there",))
    assert not output.stopped
    assert "".join(parts) == "say hello world"
    assert all("hello" not in "".join(parts[:i]) for i in range(3))


def test_without_a_tokenizer_there_is_no_text():
    output = OutputText(None, ("x",))
    assert output.push(5) == ""
    assert not output.stopped
