"""Drift correction in vLLM moves what it moves in the embedded engine, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from models import save_tiny

from engines import engine, text
from kvgraft.engine import LLM, SamplingParams
from kvgraft.graft.sparse_prefill import SparsePrefill
from kvgraft.integrations.vllm.worker.graft_job import GraftJob, read_block

DOCUMENTS = [text(40, 300), text(41, 170), text(42, 220)]
HEADS = [text(50, 33), text(51, 64), text(52, 1)]
FRONT, BETWEEN, QUESTION = text(60, 45), text(61, 30), text(62, 20)
DONORS = [head + document for head, document in zip(HEADS, DOCUMENTS, strict=True)]
PROMPT = FRONT + DOCUMENTS[1] + BETWEEN + DOCUMENTS[0] + BETWEEN[:7] + DOCUMENTS[2] + QUESTION

SERVED = {
    "llama": ("llama", {}),
    "llama in pieces": ("llama", {"load": "async", "max_recompute_tokens_per_step": 50}),
    "llama at random": ("llama", {"selection": "random"}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
}


@pytest.fixture(scope="module", params=list(SERVED))
def served(request, model_folder):
    family, options = SERVED[request.param]
    with engine(model_folder, family, options={"min_saved_tokens": 0, **options}) as one:
        yield one


@pytest.fixture
def kept(monkeypatch):
    """K/V of every graft's positions when it is made, by layer of the model: `(start, [(keys, values), ...])`."""
    kept = []
    finish = GraftJob._finish

    def finish_and_read(self):
        finish(self)
        places = np.arange(self.command.plan.exact_len, self.command.end)
        block = read_block(self._homes, places)
        kept.append((places, block))

    monkeypatch.setattr(GraftJob, "_finish", finish_and_read)
    return kept


@pytest.fixture
def expected(monkeypatch):
    kept = []
    outcome = SparsePrefill._outcome

    def read_and_tell(self, logits):
        kept.append((self._kv_indices.copy(), None if self._swa_indices is None else self._swa_indices.copy()))
        return outcome(self, logits)

    monkeypatch.setattr(SparsePrefill, "_outcome", read_and_tell)
    return kept


def test_corrected_as_in_the_embedded_engine(served, model_folder, kept, expected):
    config = served.worker._config
    reference = LLM(
        save_tiny(served.family, model_folder), selection=config.selection, min_run=32, num_slots=4096, dtype="float32"
    )
    served.forget_donors()
    served.donate(*DONORS)
    for donor in DONORS:
        reference.generate(donor, SamplingParams(1))
    kept.clear(), expected.clear()
    warm = served.ask(PROMPT)
    ((positions, block),) = kept
    told = reference.score(PROMPT, [0]).report
    print(warm.report, told)
    ((slots, swa),) = expected
    pool = reference._engine.adapter.pool
    for layer in range(len(block.keys)):
        place = pool.place(slots[positions], None if swa is None else swa[positions])
        keys, values = place.read(layer)
        print(
            layer,
            float((block.keys[layer] - keys).abs().max()),
            float((block.values[layer] - values).abs().max()),
            float(keys.abs().max()),
        )
