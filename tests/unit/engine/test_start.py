"""What a start tries out and tells, and what becomes of an engine that runs out of memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import transformers

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model, load_model
from kvgraft.engine.model.tokenizer_probe import PROBE_TEXT, probe_tokenizer
from kvgraft.errors import ModelError, RequestError
from kvgraft.testing.tiny_models import tiny_model

NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory\nframes")


class Tokenizer:
    """Gives these tokens, or fails."""

    def __init__(self, token_ids, text=PROBE_TEXT):
        self.token_ids, self.text = token_ids, text

    def __call__(self, text, add_special_tokens):
        assert text.encode() != text.encode("ascii", "ignore")
        if isinstance(self.token_ids, Exception):
            raise self.token_ids
        return {"input_ids": self.token_ids}

    def decode(self, token_ids):
        if isinstance(self.text, Exception):
            raise self.text
        return self.text


def test_a_tokenizer_that_works_is_described():
    assert probe_tokenizer("m", Tokenizer([1, 2, 3]), 4) == f"{len(PROBE_TEXT)} characters are 3 tokens"
    assert probe_tokenizer("m", Tokenizer([1], "Gr"), 4).endswith("decode to another text")


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (Tokenizer(ValueError("no\nmerges")), "cannot encode a text: ValueError: no;"),
        (Tokenizer([1], KeyError("gone")), "cannot encode a text"),
        (Tokenizer([]), "gives no token"),
        (Tokenizer([1, 9]), "gives token 9 for a text, and the model knows 4"),
        (Tokenizer([-1]), "gives token -1"),
    ],
)
def test_a_tokenizer_that_does_not_is_refused_in_one_line(tokenizer, words):
    with pytest.raises(ModelError, match=words) as caught:
        probe_tokenizer("m", tokenizer, 4)
    assert "\n" not in str(caught.value)
    assert "fetch its files again" in str(caught.value)


def test_a_model_with_such_a_tokenizer_is_not_loaded(monkeypatch):
    monkeypatch.setattr("kvgraft.engine.model.loading._load_tokenizer", lambda *_: Tokenizer([10**9]))
    with pytest.raises(ModelError, match="gives token 1000000000"):
        load_model("graft-tiny")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_directory_without_a_tokenizer_is_served_by_token_ids(tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).tokenizer is None


def test_weights_that_do_not_fit_are_one_line(monkeypatch):
    def fail(*_, **__):
        raise NO_MEMORY

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelError, match="do not fit into memory; choose a smaller model, or dtype bfloat16"):
        load_model("graft-tiny")


def test_stages_are_told_in_order_and_memory_that_runs_out_while_serving_names_the_settings(caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "kvgraft.start"):
        llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=200)
    stages = [record.getMessage() for record in caplog.records if record.name == "kvgraft.start"]
    assert stages == ["loading the model ...", "reserving memory for K/V ...", "checking the model ..."]

    def fail(_):
        raise NO_MEMORY

    monkeypatch.setattr(llm.adapter, "forward", fail)
    with pytest.raises(RequestError) as caught:
        llm.generate(np.arange(3, 40), SamplingParams(2))
    monkeypatch.undo()
    assert str(caught.value).startswith("the engine failed on this request: out of memory; lower num_slots or kv_bytes")
    assert "\n" not in str(caught.value)
    assert len(llm.generate(np.arange(3, 40), SamplingParams(2, ignore_eos=True))[0].token_ids) == 2
    llm.check()


def test_two_engines_run_one_loaded_model():
    """Each has slots and donors of its own."""
    first = LLM("graft-tiny")
    second = LLM(first.loaded)
    prompt = np.arange(5, 205)
    (cold,) = first.generate([prompt], SamplingParams(4))
    (other,) = second.generate([prompt], SamplingParams(4))
    assert other.report.exact_tokens == 0
    (warm,) = first.generate([prompt], SamplingParams(4))
    assert warm.report.exact_tokens == 199
    assert cold.token_ids == other.token_ids == warm.token_ids
