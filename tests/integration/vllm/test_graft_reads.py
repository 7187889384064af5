"""K/V of stored donors on their way into the host memory of ranks, one of which fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvgraft.errors import CapacityError
from kvgraft.integrations.vllm.messages import StoreReport
from kvgraft.integrations.vllm.worker import graft_reads

DONOR = 7


class Rank:
    """A rank that has read a donor, whose store of donors may be full."""

    def __init__(self, *, is_full):
        self.kept = []
        self.is_full = is_full
        self.reads = graft_reads.GraftReads(None, SimpleNamespace(keep=self.keep))
        promotion = self.reads._promotions[DONOR] = graft_reads._Promotion()
        promotion.blocks.append("K/V")

    def keep(self, donor_id, block):
        if self.is_full:
            raise CapacityError("no room")
        self.kept.append((donor_id, block))

    def report(self):
        self.reads.poll()
        promoted, unpromoted, unreadable = self.reads.take_news()
        return StoreReport(promoted=promoted, unpromoted=unpromoted, unreadable=unreadable)


@pytest.mark.parametrize("full", [(), (0,), (1,), (0, 1)])
def test_a_donor_that_one_rank_cannot_keep_is_in_nobodys_host_memory(full, monkeypatch):
    """Else it counts as resident, and every graft of it falls back on all ranks."""
    monkeypatch.setattr(graft_reads, "lowest", list)
    reports = [Rank(is_full=number in full).report() for number in range(2)]
    joined = reports[0].joined(reports[1])
    assert joined.unpromoted == (frozenset({DONOR}) if full else frozenset()), "drops are for those who have it"
    assert joined.promoted == (frozenset({DONOR}) if len(full) < 2 else frozenset())
