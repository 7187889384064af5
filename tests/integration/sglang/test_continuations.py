"""A session with a graft in its first call, on a real server: later turns copy what was there and compute what is new.

Slots hold no numbers until they are computed (`standins/wipe.py`).
"""

from __future__ import annotations

import random

import pytest
from models import VOCABULARY
from server import SGLangServer

from reference import Fresh, Reference

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
SETUPS = {"pages of 1": {}, "pages of 16": {"--page-size": 16}, "two ranks": {"--tp-size": 2}}
ENVIRON = {
    "TEST_KVGRAFT_WIPE": "1",
    "KVGRAFT_SELECTION": "query_seam",
    "KVGRAFT_RECOMPUTE_RATIO": "0.3",
    "KVGRAFT_PHASE_COST_TOKENS": "1",
}
TURNS = 5


@pytest.fixture(scope="module", params=list(SETUPS), ids=str)
def server(request, model_dir):
    options, environ = {"--chunked-prefill-size": 256, **SETUPS[request.param]}, dict(ENVIRON)
    if "--tp-size" in options:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    with SGLangServer(model_dir("llama"), options, environ) as made:
        made.page_size = options.get("--page-size", 1)
        yield made
        made.settle()  # SGLang counts its slots
        assert made.is_healthy(), made.log()[-3000:]
        assert made.page_size > 1 or "slots are wiped" in made.log()
        assert "failed; it goes on without" not in made.log()


@pytest.fixture(scope="module")
def reference(model_dir):
    return Reference(model_dir("llama"))


@pytest.fixture
def ids(request):
    rng = random.Random(request.node.name)
    return lambda count: [rng.randrange(3, VOCABULARY) for _ in range(count)]


def logprobs(answer):
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def ask(server, tokens, mode="graft", **fields):
    answer = server.generate(tokens, reuse=mode, **fields)
    return answer, answer["meta_info"]["kvgraft"][0]["report"]


def test_turns_of_a_session_compute_what_is_new(server, reference, ids):
    document, page = ids(400), server.page_size
    ask(server, document)
    prompt = ids(32) + document + ids(40)
    answer, told = ask(server, prompt)
    assert told["shifted_tokens"] + told["recomputed_tokens"] > 380
    for _ in range(TURNS):
        new = ids(20)
        known = len(prompt) + len(answer["output_ids"]) - 1  # the last token was drawn, and has no K/V
        prompt = prompt + answer["output_ids"] + new
        answer, told = ask(server, prompt)
        assert told["exact_tokens"] == 32
        assert known - page < 32 + told["continued_tokens"] <= known
        assert told["computed_tokens"] == len(prompt) - 32 - told["continued_tokens"]
        assert told["shifted_tokens"] == told["recomputed_tokens"] == 0
        assert [span["generation"] for span in told["spans"]] == [1]
        assert answer["meta_info"]["cached_tokens"] == len(prompt) - told["computed_tokens"]
    for mode in ("exact", "off", "verified"):
        found, told = ask(server, [*prompt, ids(1)[0]], mode)
        assert told["continued_tokens"] == told["shifted_tokens"] == 0
    want = reference.answer([Fresh(prompt)])
    found, told = ask(server, prompt, "exact")
    assert found["output_ids"] == want.tokens
    assert max(abs(a - b) for a, b in zip(logprobs(found), want.logprobs, strict=True)) < TOLERANCE


def test_others_see_nothing_of_it(server, ids):
    document = ids(400)
    for fields in ({}, {"cache_salt": "other"}):
        ask(server, document, **fields)
    prompt = ids(32) + document + ids(40)
    answer, _ = ask(server, prompt)
    prompt = prompt + answer["output_ids"] + ids(20)
    _, told = ask(server, prompt, cache_salt="other")
    assert told["continued_tokens"] == 0
    assert server.flush()
    _, told = ask(server, prompt)
    assert told["computed_tokens"] == len(prompt)


def test_a_branch_goes_on_from_the_equal_front(server, ids):
    document, page = ids(400), server.page_size
    ask(server, document)
    prompt = ids(32) + document + ids(40)
    answer, _ = ask(server, prompt)
    first = prompt + answer["output_ids"] + ids(40)
    ask(server, first)
    edited = first[:-30] + ids(40)
    _, told = ask(server, edited)
    equal = len(first) - 30
    assert equal - page < 32 + told["continued_tokens"] <= equal
