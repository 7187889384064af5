"""Counts until vLLM asks for them."""

from __future__ import annotations

from kvgraft.integrations.vllm.scheduler.counts import Counts
from kvgraft.types import GraftReport, Miss, MissReason

NOTHING = {"donors": 0, "donor_tokens": 0, "host_bytes": 0, "host_limit_bytes": 9, "is_refused": False}


def test_requests_add_up_and_are_told_once():
    counts = Counts()
    counts.take(**NOTHING)
    for _ in range(2):
        counts.request(
            GraftReport(100, 32, computed_tokens=68, timings_ms={"lookup": 2}, miss=Miss(MissReason.NO_MATCH))
        )
    counts.error()
    told = counts.take(**NOTHING)
    assert told["prompt_tokens/prefix/exact"] == 64
    assert told["graft_misses/no_match"] == 2
    assert told["lookup_seconds"] == [0.002, 0.002]
    assert told["graft_errors"] == counts.num_errors == 1
    assert counts.take(**NOTHING) is None


def test_a_gauge_that_moved_is_told_on_a_server_that_only_captures():
    counts = Counts()
    assert counts.take(**NOTHING) == {
        "donors": 0,
        "donor_tokens": 0,
        "donor_host_bytes": 0,
        "donor_host_limit_bytes": 9,
        "graft_refused": 0,
    }
    assert counts.take(**NOTHING) is None
    assert counts.take(**NOTHING | {"host_bytes": 7})["donor_host_bytes"] == 7


def test_a_refusal_is_told_once_it_is_known():
    counts = Counts()
    assert counts.take(**NOTHING)["graft_refused"] == 0
    assert counts.take(**NOTHING | {"is_refused": True})["graft_refused"] == 1
    assert counts.take(**NOTHING | {"is_refused": True}) is None


def test_a_store_rests_as_long_as_it_does_on_any_rank():
    counts, key = Counts(), "store_resting/file"
    counts.stores({key: 2, "store_reads/file/failed": 3})
    told = counts.take(**NOTHING)
    assert (told[key], told["store_reads/file/failed"]) == (1, 3)
    counts.stores({key: -1})
    assert counts.take(**NOTHING) is None
    counts.stores({key: -1})
    assert counts.take(**NOTHING)[key] == 0
    assert counts.take(**NOTHING) is None
