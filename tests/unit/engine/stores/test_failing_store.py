"""Host memory that cannot be had costs requests nothing but time."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.kv import kv_space
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import StoreError
from kvgraft.memory import HostKVStore
from kvgraft.testing.tiny_models import tiny_model

DOCUMENT = np.arange(3, 203)


class FailingStore(HostKVStore):
    fails = ""

    def put(self, key, block):
        if self.fails == "put":
            raise StoreError("no space left")
        super().put(key, block)

    def get(self, key, start=0, length=None):
        if self.fails == "get":
            raise StoreError("not there")
        return super().get(key, start, length)


def answers(family, *, grafts, fails=""):
    rng = np.random.default_rng(0)
    prompts = [DOCUMENT, *(rng.integers(3, 500, 400) for _ in range(4)), np.concatenate([[7, 8, 9], DOCUMENT, [5]])]
    model = adopt_model(family, tiny_model(family), None)
    llm = LLM(model, num_slots=600, selection="none")
    for prompt in prompts:
        if grafts:
            llm.space.host.fails = fails
        yield llm.generate(prompt, SamplingParams(4, ignore_eos=True), reuse="graft" if grafts else "off")[0]
        llm.check()


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def computed(request):
    """A family, and its answers without grafts."""
    return request.param, [one.token_ids for one in answers(request.param, grafts=False)]


@pytest.mark.parametrize("fails", ["put", "get"])
def test_a_store_that_fails_makes_misses(computed, fails, monkeypatch):
    monkeypatch.setattr(kv_space, "HostKVStore", FailingStore)
    family, due = computed
    found = list(answers(family, grafts=True, fails=fails))
    assert [one.token_ids for one in found] == due
    assert found[-1].report.shifted_tokens == 0


def test_without_failures_it_is_grafted(computed, monkeypatch):
    monkeypatch.setattr(kv_space, "HostKVStore", FailingStore)
    family, _ = computed
    assert list(answers(family, grafts=True))[-1].report.shifted_tokens == 200
