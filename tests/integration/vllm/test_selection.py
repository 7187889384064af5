"""Policies that look before they choose see in vLLM what they see in the embedded engine, and choose the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from models import save_tiny

from engines import BLOCK, engine, text
from kvgraft.engine import LLM, SamplingParams
from kvgraft.graft.select import QuerySeam

RATIO = 0.1
DOCUMENTS = [text(40, 300), text(41, 170), text(42, 220)]
HEADS = [text(50, 33), text(51, 64), text(52, 1)]
FRONT, BETWEEN, QUESTION, LONG_QUESTION = text(60, 45), text(61, 30), text(62, 20), text(63, 150)
LAST_IN_A_BLOCK = text(64, 1 + -(len(DOCUMENTS[2]) + len(DOCUMENTS[0])) % BLOCK)


@dataclass
class Told:
    """What a policy was shown and what it chose, prompt by prompt."""

    masses: list[np.ndarray] = field(default_factory=list)
    chosen: list[list[int]] = field(default_factory=list)


@pytest.fixture
def told(monkeypatch):
    told = Told()
    steps = QuerySeam.steps

    def overheard(self, context):
        choosing = steps(self, context)
        step = next(choosing)
        while True:
            observation = yield step
            if observation.attention_mass is not None:
                told.masses.append(observation.attention_mass.copy())
            try:
                step = choosing.send(observation)
            except StopIteration:
                told.chosen.append(step.positions.tolist())
                return

    monkeypatch.setattr(QuerySeam, "steps", overheard)
    return told


SERVED = {
    "llama": ("llama", {}),
    "llama in pieces": ("llama", {"load": "async", "max_recompute_tokens_per_step": 50}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "gemma3 in pieces": ("gemma3", {"max_recompute_tokens_per_step": 50}),
}


@pytest.fixture(scope="module", params=list(SERVED))
def served(request, model_folder):
    family, options = SERVED[request.param]
    looking = {
        "selection": "query_seam",
        "recompute_ratio": RATIO,
        "correction": "none",
        "min_saved_tokens": 0,
        "repair": "before",
        **options,
    }
    with engine(model_folder, family, options=looking) as one:
        yield one


@pytest.fixture(scope="module")
def reference(served, model_folder):
    return LLM(
        save_tiny(served.family, model_folder),
        selection="query_seam",
        recompute_ratio=RATIO,
        correction="none",
        min_run=32,
        num_slots=4096,
        dtype="float32",
    )


@pytest.mark.parametrize(
    ("front", "question"),
    [
        (
            FRONT + DOCUMENTS[1] + BETWEEN + DOCUMENTS[0] + BETWEEN[:7] + DOCUMENTS[2],
            QUESTION,
        ),  # query rows in two gaps
        (DOCUMENTS[2] + DOCUMENTS[0], LONG_QUESTION),  # no gap, and rows behind the graft that are no query
        (DOCUMENTS[2] + DOCUMENTS[0], LAST_IN_A_BLOCK),  # the last token is none of those that vLLM has a block for yet
        (DOCUMENTS[2] + DOCUMENTS[0], QUESTION[:1]),
    ],
    ids=["query in gaps", "no gaps", "last token in a block of its own", "one token"],
)
def test_query_seam_chooses_what_it_chooses_in_the_embedded_engine(served, reference, told, front, question):
    prompt = front + question
    served.forget_donors()
    donors = [head + document for head, document in zip(HEADS, DOCUMENTS, strict=True)]
    served.donate(*donors)
    reference.reset()
    for donor in donors:
        reference.generate(donor, SamplingParams(1))
    told.masses.clear(), told.chosen.clear()  # embedded donors were asked too, with nothing to choose from

    warm = served.ask(prompt)
    expected = reference.score(prompt, [0])
    assert warm.shifted + warm.report["recomputed_tokens"] == (
        expected.report.shifted_tokens + expected.report.recomputed_tokens
    )
    (mine, theirs), (chosen, expected_chosen) = told.masses, told.chosen
    np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-4)
    assert chosen == expected_chosen
    assert warm.report["recomputed_tokens"] == len(chosen) == expected.report.recomputed_tokens > 30
    assert warm.report["recomputed_runs"] == [list(run) for run in expected.report.recomputed_runs] != []
    assert warm.report["policy"] == "query_seam"
    # Of models with windows all gaps are computed a second time, which the embedded engine does not do.
    if served.family != "gemma3":
        logprobs = torch.log_softmax(expected.logits[0].float(), -1)
        for token, logprob in warm.logprobs[0].items():
            assert math.isclose(logprob, float(logprobs[token]), abs_tol=1e-4)
    served.check()


def test_what_gaps_computed_is_kept_once(served):
    """Gaps that are computed a second time, behind repaired tokens, do not grow a text twice."""
    served.forget_donors()
    served.donate(HEADS[0] + DOCUMENTS[0], HEADS[1] + DOCUMENTS[1])
    bytes_per_token = kept_bytes(served) / served.scheduler.registry.catalogue.num_tokens
    gap = text(70, 120)
    first = served.ask(FRONT + DOCUMENTS[0] + gap + DOCUMENTS[1] + QUESTION)
    assert first.report["recomputed_tokens"] == math.ceil(RATIO * (len(DOCUMENTS[0]) + len(DOCUMENTS[1])))
    served.llm.reset_prefix_cache()
    warm = served.ask(text(71, 77) + gap + text(72, 20), max_tokens=1)
    assert warm.shifted + warm.report["recomputed_tokens"] == len(gap)
    assert kept_bytes(served) == bytes_per_token * served.scheduler.registry.catalogue.num_tokens
    served.check()


def kept_bytes(served):
    """Of donors, on the worker; those that the scheduler dropped leave with the next request's commands."""
    served.ask(text(73, 5), "off", max_tokens=1)
    return served.worker._donors.used_bytes
