"""Prompts that hit what others are computing, on a real server: an answer without reuse is what a full prefill gives.

D is known. A = S + other, which may not reuse anything, is computed in chunks; prompts like B = S + G + D + q come with it.
C = S + G + other may reuse exact prefixes alone. Slots hold no numbers until they are computed (`standins/wipe.py`).
"""

from __future__ import annotations

import random

import pytest
from models import VOCABULARY
from server import SGLangServer

from reference import Fresh, Reference

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
SETUPS = {
    "overlap": {},
    "no overlap": {"--disable-overlap-schedule": None},
    "mixed batches": {"--enable-mixed-chunk": None},
    "two ranks": {"--tp-size": 2},
}
ENVIRON = {
    "TEST_KVGRAFT_WIPE": "1",
    "KVGRAFT_SELECTION": "query_seam",
    "KVGRAFT_RECOMPUTE_RATIO": "0.3",
    "KVGRAFT_PHASE_COST_TOKENS": "1",
    "KVGRAFT_MAX_GENERATION": "0",
}


@pytest.fixture(scope="module", params=list(SETUPS), ids=str)
def server(request, model_dir):
    options, environ = {"--chunked-prefill-size": 256, **SETUPS[request.param]}, dict(ENVIRON)
    if "--tp-size" in options:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    with SGLangServer(model_dir("llama"), options, environ) as made:
        yield made
        made.settle()  # SGLang counts its slots
        assert made.is_healthy(), made.log()[-3000:]
        assert "slots are wiped" in made.log()
        assert "failed; it goes on without" not in made.log()


@pytest.fixture(scope="module")
def reference(model_dir):
    return Reference(model_dir("llama"))


def together(server, *requests):
    """Send prompts in one call, so that the scheduler finds all of them in its queue; `(tokens, mode)` each."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    params = [{**sampling, "custom_params": {"kvgraft": mode}} for _, mode in requests]
    prompts = [tokens for tokens, _ in requests]
    return server.post("/generate", {"input_ids": prompts, "sampling_params": params, "return_logprob": True})


def logprobs_of(got):
    return [entry[0] for entry in got["meta_info"]["output_token_logprobs"]]


def distance(got, tokens, logprobs):
    """How far an answer is from another one, up to the first token in which they differ; infinite if it is none."""
    worst = 0.0
    for token, logprob, other, expected in zip(got["output_ids"], logprobs_of(got), tokens, logprobs, strict=True):
        if not abs(logprob - expected) < float("inf"):
            return float("inf")
        worst = max(worst, abs(logprob - expected))
        if token != other:
            break
    return worst


@pytest.mark.parametrize("length_of_a", [150, 1000], ids=["in one batch", "while A is computed in chunks"])
def test_answers_beside_an_unfinished_beginning(server, reference, length_of_a):
    rng = random.Random(length_of_a)

    def ids(count):
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    system, gap, document = ids(200), ids(30), ids(400)
    a, b = system + ids(length_of_a), system + gap + document + ids(20)
    adjoining = system + document[100:350] + ids(20)  # fits whole beside a chunk of A
    c = system + gap + ids(100)
    donor = ids(7) + document
    server.generate(donor, 2)
    got = dict(zip("abn", together(server, (a, "off"), (b, "graft"), (adjoining, "graft")), strict=True))
    got["c"] = server.generate(c, reuse="off")
    for name, prompt in (("a", a), ("c", c)):
        want = reference.answer([Fresh(prompt)])
        assert distance(got[name], want.tokens, want.logprobs) < TOLERANCE, name
    assert got["a"]["meta_info"]["cached_tokens"] == 0
    assert got["c"]["meta_info"]["cached_tokens"] == len(system + gap), "B's gap, which is exact, and nothing behind it"
    # A prompt that is asked again goes on from what it was answered from, repaired in the meantime.
    assert server.flush()
    server.generate(donor, 2)
    server.generate(system + gap + ids(1), 1, reuse="off")
    for name, prompt in (("b", b), ("n", adjoining)):
        attempt = got[name]["meta_info"]["kvgraft"][0]["attempts"][-1]
        assert attempt["shifted_tokens"] > 100
        assert attempt["recomputed_tokens"] > 16
        # Nothing is unfinished now: the same copies and passes give the same answer.
        again = server.generate(prompt)
        assert distance(got[name], again["output_ids"], logprobs_of(again)) < TOLERANCE, name
