"""K/V of stored donors on their way to the grafts and into the host memory of ranks, one of which fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvgraft.errors import CapacityError
from kvgraft.integrations.vllm.messages import DonorToRead, StepCommands, StoreReport, Write
from kvgraft.integrations.vllm.worker import graft_reads
from kvgraft.integrations.vllm.worker.graft_worker import GraftWorker
from kvgraft.integrations.vllm.worker.outbox import Outbox
from kvgraft.memory.store.tier import TaskThreads

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


class Read:
    """Has arrived."""

    def settle(self):
        return True

    def block(self):
        return SimpleNamespace(span=lambda start, length: (start, length), keys=(), values=())

    def cancel(self):
        pass


SPANS = [SimpleNamespace(donor_id=DONOR, donor_start=0, length=5), SimpleNamespace(donor_id=8, donor_start=3, length=4)]
GRAFT = SimpleNamespace(
    request_id="one",
    spans=SPANS,
    stored={DONOR: DonorToRead("a", 9, is_promoted=True), 8: DonorToRead("b", 9, is_promoted=False)},
    deadline_s=60.0,
)


def no_thread(*_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("num_begun", [0, 1])
def test_a_read_that_cannot_begin_fails_its_graft_on_all_ranks(num_begun, monkeypatch):
    """Others wait for this rank in `poll`; an exception would end its process instead."""
    begun = []
    stores = SimpleNamespace(
        read=lambda *asked: begun.append(asked) or (Read() if len(begun) <= num_begun else no_thread())
    )
    reads = graft_reads.GraftReads(stores, SimpleNamespace())
    told = []
    monkeypatch.setattr(graft_reads, "lowest", lambda values: told.append(values) or list(values))
    reads.begin(GRAFT)
    arrived, failed = reads.poll()
    assert told == [[graft_reads._GIVEN_UP]]
    assert not arrived
    assert "can't start new thread" in failed["one"]
    assert reads.take_news() == (frozenset(), frozenset({DONOR}), frozenset())


def test_a_donor_that_no_thread_copies_is_promoted_on_no_rank(monkeypatch):
    told = []
    monkeypatch.setattr(graft_reads, "lowest", lambda values: told.append(values) or list(values))
    reads = graft_reads.GraftReads(SimpleNamespace(read=lambda *_: Read()), SimpleNamespace())
    monkeypatch.setattr(TaskThreads, "submit", no_thread)
    reads.begin(GRAFT)
    arrived, failed = reads.poll()
    assert (arrived, failed) == ({"one": [(0, (0, 5)), (1, (0, 4))]}, {})
    reads.poll()
    assert told == [[2], [graft_reads._GIVEN_UP]]
    assert reads.take_news() == (frozenset(), frozenset({DONOR}), frozenset())


def test_a_donor_that_cannot_be_written_is_counted():
    worker = object.__new__(GraftWorker)
    worker._rank = worker._handle = None
    worker._refusal, worker._num_changes, worker.outbox = "", 0, Outbox()
    worker._donors = SimpleNamespace(later=lambda donor_id: lambda: None)
    worker._stores = SimpleNamespace(write=no_thread)
    worker.save(StepCommands(writes=(Write(1, None), Write(2, None))))
    assert worker.outbox.num_failed_copies == 2
