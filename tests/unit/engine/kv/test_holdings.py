"""What an attempt holds is given back whole, at any moment and however often it is asked."""

import numpy as np
import pytest

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import CapacityError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

FAMILIES = ["llama", "gemma3_text"]


@pytest.fixture(params=FAMILIES)
def llm(request, looks_are_free):
    return LLM(adopt_model(request.param, tiny_model(request.param), None), num_slots=800)


def grafted_request(llm, rng):
    document = rng.integers(3, VOCABULARY, 150)
    llm.generate(document, SamplingParams(1))
    prompt = np.concatenate([rng.integers(3, VOCABULARY, 20), document, rng.integers(3, VOCABULARY, 20)])
    return llm._engine.builder.build(prompt)


def test_aborting_twice_gives_back_once(llm, rng):
    manager, request = llm._engine.manager, grafted_request(llm, rng)
    before = llm.usage()
    kv = manager.begin(request)
    assert kv.held.has_donors
    manager.abort(kv)
    manager.abort(kv)
    assert llm.usage() == before
    llm.check()


@pytest.mark.parametrize("where", ["_allocate_prompt", "_begin_windows"])
def test_a_failure_while_it_begins_leaves_nothing_held(llm, where, rng, monkeypatch):
    manager, request = llm._engine.manager, grafted_request(llm, rng)
    before = llm.usage()

    def full(*_, **__):
        raise CapacityError("no slots")

    with monkeypatch.context() as patch:
        patch.setattr(manager, where, full)
        with pytest.raises(CapacityError, match="no slots"):
            manager.begin(request)
    assert llm.usage() == before
    assert not any(map(llm.space.donors.is_pinned, [donor.donor_id for donor in llm.space.donors]))
    llm.check()
