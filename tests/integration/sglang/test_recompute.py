"""Reused tokens computed again in a real server: everything gives a full prefill, a share what the embedded engine gives.

What is copied is approximate, what a pass of ours computes must be what SGLang computes: with every reused token computed
again the answer is that of the model in transformers, which knows nothing of reuse.
"""

from __future__ import annotations

import random

import pytest
from models import VOCABULARY
from server import SGLangServer

from reference import Copied, Fresh, Reference

pytestmark = pytest.mark.engine

TOLERANCE = 1e-5
SETUPS = {
    "llama": ("llama", {}),
    "qwen3 in pages of 16, overlap off": ("qwen3", {"--page-size": 16, "--disable-overlap-schedule": None}),
}


class Prompts:
    """A document, which a first request computes, and prompts around parts of it."""

    def __init__(self):
        self._rng = random.Random(7)
        self.doc = self.ids(608)
        self.first = self.ids(48) + self.doc

    def ids(self, count):
        return [self._rng.randrange(3, VOCABULARY) for _ in range(count)]


@pytest.fixture
def prompts():
    return Prompts()


def close(got, want):
    logprobs = [entry[0] for entry in got["meta_info"]["output_token_logprobs"]]
    return (
        got["output_ids"] == want.tokens
        and max(abs(a - b) for a, b in zip(logprobs, want.logprobs, strict=True)) < TOLERANCE
    )


@pytest.mark.parametrize("setup", SETUPS)
def test_everything_computed_again_is_a_full_prefill(setup, prompts, model_dir):
    model, options = SETUPS[setup]
    reference = Reference(model_dir(model))
    environ = {"KVGRAFT_SELECTION": "query_seam", "KVGRAFT_RECOMPUTE_RATIO": "1", "KVGRAFT_MAX_GENERATION": "0"}
    system = prompts.ids(64)
    asked = {
        "behind an exact prefix": system + prompts.doc[96:400] + prompts.ids(20),
        "at the very start": prompts.doc[32:352] + prompts.ids(20),
        "three regions": prompts.ids(32)
        + prompts.doc[304:464]
        + prompts.ids(16)
        + prompts.doc[32:192]
        + prompts.ids(16)
        + prompts.doc[480:576]
        + prompts.ids(20),
    }
    with SGLangServer(model_dir(model), options, environ) as server:
        server.generate(prompts.first, 2)
        server.generate(system + prompts.ids(8), 2)
        for where, prompt in asked.items():
            got = server.generate(prompt)
            report = got["meta_info"]["kvgraft"][0]["attempts"][-1]
            assert report["recomputed_tokens"] > 200, where
            assert report["shifted_tokens"] == 0, where
            assert close(got, reference.answer([Fresh(prompt)])), where
        assert "failed; it goes on without" not in server.log()
