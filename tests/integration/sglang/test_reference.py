"""Answers of a stock SGLang server with the backend against transformers with the same K/V surgery, token by token.

The donors here are computed behind nothing, so `max_generation` is 0: text that a grafted request computed is not reused.
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
    "llama": ("llama", {}, {}),
    "qwen3 in pages of 16, chunks of 256": ("qwen3", {"--page-size": 16, "--chunked-prefill-size": 256}, {}),
    "llama3 scaling, first_k, overlap off, Python tree": (
        "llama3",
        {"--disable-overlap-schedule": None},
        {
            "KVGRAFT_SELECTION": "first_k",
            "KVGRAFT_FIRST_K": "8",
            "KVGRAFT_REPAIR": "before",
            "KVGRAFT_CORRECTION": "none",
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        },
    ),
}


class Bench:
    """A server and the model that says what it must answer."""

    def __init__(self, server, reference, page_size, first_k):
        self.server, self.reference, self.page_size, self.first_k = server, reference, page_size, first_k
        self.rng = random.Random(5)
        self.system, self.doc_a, self.doc_b = self.ids(208), self.ids(608), self.ids(512)
        self.prompt_a = self.ids(48) + self.doc_a + self.ids(16)
        self.prompt_b = self.ids(32) + self.doc_b + self.ids(16)
        self.prompt_system = self.system + self.ids(24)
        self.caches = {}

    def ids(self, count):
        return [self.rng.randrange(3, VOCABULARY) for _ in range(count)]

    def seed(self):
        """Let the server compute the donors."""
        for name in ("prompt_a", "prompt_b", "prompt_system"):
            self.server.generate(getattr(self, name), 2)
            self.caches[name[-1]] = self.reference.cache_of(Fresh(getattr(self, name)))

    def from_a(self, first, last):
        return ("a", 48 + first, self.doc_a[first:last])

    def from_b(self, first, last):
        return ("b", 32 + first, self.doc_b[first:last])

    def check(self, *pieces, prefix_len=0, goes_on=False):
        """Send a prompt of fresh tokens (lists) and reused ones (triples); compare answer and count.

        Args:
            pieces: Of the prompt.
            prefix_len: Tokens of the prompt that an exact prefix gives.
            goes_on: It was asked before, so that all but its last token is there as it was computed and copied then.
        """
        prompt = [token for piece in pieces for token in (piece if isinstance(piece, list) else piece[2])]
        parts, copied = self.parts(pieces, prefix_len)
        want = self.reference.answer(parts)
        got = self.server.generate(prompt)
        meta = got["meta_info"]
        known = (len(prompt) - 1) // self.page_size * self.page_size if goes_on else prefix_len + copied
        assert meta["cached_tokens"] == known
        told = meta["kvgraft"][0]["report"]
        assert told["continued_tokens"] == (known - prefix_len if goes_on else 0)
        assert told["exact_tokens"] == prefix_len
        assert got["output_ids"] == want.tokens
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        assert max(abs(a - b) for a, b in zip(logprobs, want.logprobs, strict=True)) < TOLERANCE
        return meta

    def parts(self, pieces, prefix_len):
        """Translate a prompt into computed and copied parts: whole pages behind the exact prefix, heads computed again."""
        parts, position, copied = [], 0, 0
        for piece in pieces:
            if isinstance(piece, list):
                parts.append(Fresh(piece))
                position += len(piece)
                continue
            donor, donor_start, tokens = piece
            start = -(-max(position, prefix_len) // self.page_size) * self.page_size
            stop = (position + len(tokens)) // self.page_size * self.page_size
            kept = start + self.first_k
            parts += [
                Fresh(tokens[: kept - position]),
                Copied(self.caches[donor], donor_start + kept - position, stop - kept),
                Fresh(tokens[stop - position :]),
            ]
            copied += stop - start
            position += len(tokens)
        return parts, copied


@pytest.fixture(scope="module", params=list(SETUPS), ids=str)
def bench(request, model_dir):
    model, options, environ = SETUPS[request.param]
    environ = {"KVGRAFT_MAX_GENERATION": "0", **environ}
    first_k = int(environ.get("KVGRAFT_FIRST_K", 0))
    with SGLangServer(model_dir(model), options, environ) as server:
        made = Bench(server, Reference(model_dir(model)), int(options.get("--page-size", 1)), first_k)
        made.seed()
        yield made
        assert server.is_healthy(), server.log()[-3000:]
        assert "failed; it goes on without" not in server.log()


def test_cold_prompt_is_what_the_model_says(bench):
    bench.check(bench.ids(300))


def test_exact_repeat_reuses_all_but_the_last_token(bench):
    prompt = bench.ids(100)
    bench.check(prompt)
    bench.check(prompt, prefix_len=99 // bench.page_size * bench.page_size)


def test_one_region_behind_an_exact_prefix_and_the_same_again(bench):
    tail = bench.ids(25)
    exact = 208
    meta = bench.check(bench.system, bench.from_a(96, 400), tail, prefix_len=exact)
    assert meta["cached_tokens_details"] == {"device": exact, "host": 304}
    bench.check(bench.system, bench.from_a(96, 400), tail, prefix_len=exact, goes_on=True)


def test_a_full_prefill_would_answer_differently(bench):
    pieces = [bench.system, bench.from_a(96, 400), bench.ids(25)]
    flat = [token for piece in pieces for token in (piece if isinstance(piece, list) else piece[2])]
    parts, _ = bench.parts(pieces, 208)
    assert bench.reference.answer(parts).logprobs != bench.reference.answer([Fresh(flat)]).logprobs


def test_region_at_the_very_start(bench):
    bench.check(bench.from_a(32, 300), bench.ids(20))


def test_three_reordered_regions_and_the_same_again(bench):
    gaps = [bench.ids(70), bench.ids(40), bench.ids(30), bench.ids(20)]
    pieces = [gaps[0], bench.from_a(300, 600), gaps[1], bench.from_b(50, 450), gaps[2], bench.from_a(0, 250), gaps[3]]
    bench.check(*pieces)
    # What was computed in front of the first copy is exact and was published; nothing else was.
    start = -(-70 // bench.page_size) * bench.page_size
    bench.check(*pieces, prefix_len=start, goes_on=True)
    prompt = [token for piece in pieces for token in (piece if isinstance(piece, list) else piece[2])]
    exact = bench.server.generate(prompt, reuse="exact")
    assert exact["meta_info"]["cached_tokens"] == start


def test_adjacent_regions_of_two_donors(bench):
    pieces = [
        bench.system,
        bench.from_a(0, 208),
        bench.from_b(0, 208),
        bench.ids(48),
        bench.from_b(300, 508),
        bench.ids(25),
    ]
    bench.check(*pieces, prefix_len=208)


def test_report_names_sources_and_steps(bench):
    meta = bench.check(bench.ids(64), bench.from_b(64, 400), bench.ids(17))
    (report,) = meta["kvgraft"]
    attempt = report["attempts"][-1]
    assert attempt["shifted_tokens"] == meta["cached_tokens"] - bench.first_k
    assert attempt["exact_tokens"] == 0
    assert attempt["prefill_steps"] >= 2
    assert attempt["recomputed_tokens"] == bench.first_k
    assert attempt["computed_tokens"] == attempt["num_tokens"] - meta["cached_tokens"] + bench.first_k
    assert attempt["sources"][0]["tier"] == "device"
    assert bench.server.reports()[meta["id"]] == report


def test_other_namespaces_reuse_nothing(bench):
    prompt = bench.ids(40) + bench.doc_a[0:300] + bench.ids(10)
    cold = bench.reference.answer([Fresh(prompt)])
    for fields in ({"extra_key": "tenant"}, {"cache_salt": "salt"}, {"extra_key": "tenant", "cache_salt": "salt"}):
        got = bench.server.generate(prompt, **fields)
        assert got["meta_info"]["cached_tokens"] == 0, fields
        assert got["output_ids"] == cold.tokens


def test_input_logprobs_are_those_of_a_computed_prompt(bench):
    prompt = bench.ids(40) + bench.doc_a[0:300] + bench.ids(10)
    got = bench.server.generate(prompt, logprob_start_len=100, cache_salt=None)
    meta = got["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(prompt) - 100
    assert meta["cached_tokens"] == 0
    assert meta["kvgraft"][0]["report"]["miss"]["reason"] == "model_refused"
