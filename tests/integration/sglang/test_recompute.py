"""Reused tokens computed again in a real server: the answers must be the embedded engine's, which does the same elsewhere.

What a policy leaves is approximate, so a full prefill is no yardstick; but both engines copy, look, choose, compute and
correct the same, and the embedded one is tested against the model's own forward.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from models import VOCABULARY
from server import SGLangServer

from kvgraft.engine.llm import LLM
from kvgraft.engine.sampling.sampling_params import SamplingParams
from reference import Fresh, Reference

if TYPE_CHECKING:
    from kvgraft.types import GraftReport

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
RATIO = 0.3
SETUPS = {
    "llama, query_seam": ("llama", {}, "query_seam", "drift"),
    "qwen3 in pages of 16, chunks of 256, overlap off, query_seam": (
        "qwen3",
        {"--page-size": 16, "--chunked-prefill-size": 256, "--disable-overlap-schedule": None},
        "query_seam",
        "drift",
    ),
    # Ranks weigh tokens by the K/V of their own heads when they estimate drift, the embedded engine by those of all.
    "llama3 scaling, two ranks, query_attention": ("llama3", {"--tp-size": 2}, "query_attention", "none"),
    "llama, first_k": ("llama", {}, "first_k", "drift"),
}
EMBEDDED = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=0)


class Prompts:
    """A document, which a first request computes, and prompts around parts of it. Lengths are whole pages."""

    def __init__(self):
        self._rng = random.Random(7)
        self.doc, self.system = self.ids(608), self.ids(64)
        doc = self.doc
        self.donors = [self.ids(48) + doc, self.system + self.ids(16)]
        self.continued = self.donors[0] + self.ids(20)
        self.asked = {
            "behind an exact prefix": self.system + doc[96:400] + self.ids(64),
            "at the very start": doc[32:352] + self.ids(64),
            "three regions, reordered": self.ids(32)
            + doc[304:464]
            + self.ids(16)
            + doc[32:192]
            + self.ids(16)
            + doc[480:576]
            + self.ids(32),
        }

    def ids(self, count):
        return [self._rng.randrange(3, VOCABULARY) for _ in range(count)]


def logprobs_of(got):
    return [entry[0] for entry in got["meta_info"]["output_token_logprobs"]]


def distance(got, tokens, logprobs):
    """How far an answer of the server is from another one, up to the first token in which they differ."""
    worst = 0.0
    for token, logprob, other, other_logprob in zip(got["output_ids"], logprobs_of(got), tokens, logprobs, strict=True):
        worst = max(worst, abs(logprob - other_logprob))
        if token != other:
            break
    return worst


@pytest.fixture(scope="module", params=list(SETUPS), ids=str)
def answers(request, model_dir):
    """Prompts, the server's answers to them, and a function that asks the embedded engine."""
    model, options, selection, correction = SETUPS[request.param]
    prompts = Prompts()
    environ = {
        "KVGRAFT_SELECTION": selection,
        "KVGRAFT_RECOMPUTE_RATIO": str(RATIO),
        "KVGRAFT_CORRECTION": correction,
        "KVGRAFT_MAX_GENERATION": "0",
        "KVGRAFT_REPAIR": "before",  # what it computes after the first token: test_repair_after.py
    }
    if "--tp-size" in options:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    with SGLangServer(model_dir(model), options, environ) as server:
        for prompt in prompts.donors:
            server.generate(prompt, 2)
        got = {where: server.generate(prompt) for where, prompt in prompts.asked.items()}
        continued = server.generate(prompts.continued)
        salted = server.generate(prompts.asked["at the very start"], cache_salt="other")
        again = {where: server.generate(prompt) for where, prompt in prompts.asked.items()}
        server.settle()  # the strict memory check at idle has seen every slot
        assert server.is_healthy(), server.log()[-3000:]
        assert "failed; it goes on without" not in server.log()

    def embedded(correction):
        llm = LLM(
            model_dir(model), dtype="float32", device="cpu", num_slots=8000, selection=selection,
            recompute_ratio=RATIO, correction=correction, repair="before", max_generation=0,
        )  # fmt: skip
        llm.generate(prompts.donors, SamplingParams(max_new_tokens=2, ignore_eos=True))
        return {where: embedded_answer(llm, prompt) for where, prompt in prompts.asked.items()}

    others = {"continued": continued, "salted": salted, "again": again}
    return prompts, got, others, (embedded, correction), Reference(model_dir(model))


class Embedded(NamedTuple):
    """An answer of the embedded engine."""

    tokens: list[int]
    logprobs: list[float]
    report: GraftReport


def embedded_answer(llm, prompt):
    parts = list(llm.stream(prompt, EMBEDDED))
    told = [part for part in parts if part.logprobs is not None]
    return Embedded([part.token_id for part in told], [part.logprobs.logprob for part in told], parts[-1].output.report)


def attempt_of(got):
    return got["meta_info"]["kvgraft"][0]["attempts"][-1]


def test_answers_and_counts_are_the_embedded_engines(answers):
    _, got, _, (embedded, correction), _ = answers
    for where, want in embedded(correction).items():
        attempt, report = attempt_of(got[where]), want.report
        assert report.recomputed_tokens >= 16, where
        assert attempt["recomputed_tokens"] == report.recomputed_tokens, where
        assert attempt["recomputed_runs"] == [list(run) for run in report.recomputed_runs] != [], where
        assert attempt["corrected_tokens"] == report.corrected_tokens, where
        assert bool(report.corrected_tokens) == (correction == "drift"), where
        assert attempt["shifted_tokens"] == report.shifted_tokens, where
        assert distance(got[where], want.tokens, want.logprobs) < TOLERANCE, where


def test_with_the_other_correction_they_would_differ(answers):
    _, got, _, (embedded, correction), _ = answers
    other = embedded("none" if correction == "drift" else "drift")
    assert all(distance(got[where], want.tokens, want.logprobs) > 10 * TOLERANCE for where, want in other.items())


def test_donors_and_other_requests_are_as_they_were(answers):
    """A prompt that goes on from a donor, one of another tenant, and the same prompts once more."""
    prompts, got, others, _, reference = answers
    full = {"continued": prompts.continued, "salted": prompts.asked["at the very start"]}
    for name, prompt in full.items():
        want = reference.answer([Fresh(prompt)])
        assert distance(others[name], want.tokens, want.logprobs) < TOLERANCE, name
    assert others["continued"]["meta_info"]["cached_tokens"] >= 640
    for where in got:
        assert distance(others["again"][where], got[where]["output_ids"], logprobs_of(got[where])) < TOLERANCE
