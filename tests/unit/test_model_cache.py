"""The K/V cache goes to models, and comes back, under the name that the installed transformers has for it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from transformers.utils import logging as transformers_logging

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.fidelity import cache_argument, cache_of
from kvgraft.fidelity.stock import stock_answer
from kvgraft.testing.tiny_models import FAMILIES, VOCABULARY, tiny_model


class Old:
    def forward(self, input_ids, past_key_values=None):
        """As in transformers up to 5.23."""


class New:
    def forward(self, input_ids, cache=None):
        """As in transformers since 5.24."""


@pytest.mark.parametrize(("kind", "name"), [(Old, "past_key_values"), (New, "cache")])
def test_the_name_is_that_of_the_signature(kind, name):
    kv = SimpleNamespace()
    assert cache_argument(kind(), kv) == {name: kv}
    assert cache_of({"logits": None, name: kv}) is kv
    assert cache_of({"logits": None}) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_deprecated_is_asked_of_a_model(family, rng, monkeypatch):
    """transformers warns once per process and only in its log, so that every call is caught here."""
    said = []
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    for name in ("warning_once", "warning"):
        monkeypatch.setattr(f"logging.Logger.{name}", lambda logger, text, *_, **__: said.append(str(text)))
    model = tiny_model(family)
    prompt = rng.integers(3, VOCABULARY, 60)
    own = stock_answer(model, prompt, 3)
    (output,) = LLM(adopt_model(family, model, None), num_slots=200).generate(
        prompt, SamplingParams(3, ignore_eos=True)
    )
    assert np.array_equal(own.token_ids, output.token_ids)
    assert [text for text in said if "deprecat" in text] == []
