"""Requests through the books of the SGLang backend, in which one call fails, and what must hold afterwards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from tests.support.failing_calls import CallDrill, EscapedError, FailingCalls, Place, Watched
from tests.unit.integrations.sglang.rank_threads import ThreadRanks, on_ranks
from tests.unit.integrations.sglang.scheduler import Scheduler, order_of
from tests.unit.integrations.sglang.shelf import Shelf

KINDS = {
    "plain": {"recomputes": False, "selection": "none"},
    "passes": {"recomputes": True, "selection": "first_k", "page_size": 4},
    "store": {"recomputes": False, "selection": "first_k"},
}
"""By whether passes of our own are run, and where donors are."""
_DOCUMENTS = [[1000 * number + index for index in range(70)] for number in range(1, 4)]
_PARTS = ("books", "promises", "loading", "repairs", "publishing", "ends")
"""Of `RequestReuse`; SGLang calls these, but for checks of books."""
_MOST_ROUNDS = 200


@dataclass
class Drill(CallDrill):
    """A kind of scheduler."""

    kind: str

    def run(self, calls: FailingCalls) -> list[str]:
        return _Run(self.kind, calls).failures()


@dataclass
class RankDrill(CallDrill):
    """Two ranks with a kind of scheduler, of which a call on one fails: the other is to notice, and to do the same."""

    kind: str
    rank: int

    def is_guarded(self, place: Place) -> bool:
        """Whether a failure there is to be caught: what ranks fail together by must not fail itself."""
        return super().is_guarded(place) and not place.callee.startswith(("Together.", "FailedTogether", "guarded."))

    def run(self, calls: FailingCalls) -> list[str]:
        shelf = Shelf() if self.kind == "store" else None

        def program(ranks):
            is_watched = ranks.rank == self.rank
            if is_watched:
                calls.watch_this_thread()
            run = _Run(self.kind, calls if is_watched else contextlib.nullcontext(), ranks, shelf)
            run.scheduler.may_lack_reports = calls.is_to_fail
            run.play()
            return run.scheduler.log.num_errors

        try:
            on_ranks(2, program)
        except EscapedError as error:
            return [f"a: {error.__cause__!r}"]
        except Exception as error:  # noqa: BLE001 - a finding
            return [f"b: {error!r}"]
        return []


def watched(part: object, calls) -> Watched:
    """A part, of which every public call is watched but `check`, which raises."""
    names = {name for name, value in vars(type(part)).items() if callable(value) and not name.startswith("_")}
    return Watched(part, names - {"check"}, calls)


class _Run:
    def __init__(self, kind: str, calls, ranks: ThreadRanks | None = None, shelf: Shelf | None = None) -> None:
        self.ranks, self.shelf = ranks, Shelf() if shelf is None and kind == "store" else shelf
        settings = {"first_k": 4, "max_generation": 2, **KINDS[kind]}
        self.scheduler = Scheduler(shelf=self.shelf, ranks=ranks, **settings)
        self.scheduler.may_lack_reports = ranks is None and calls.is_to_fail
        self.reuse = self.scheduler.reuse
        self.watched = [watched(self.reuse, calls)]
        for name in _PARTS:
            self.watched.append(watched(getattr(self.reuse, name), calls))
            setattr(self.reuse, name, self.watched[-1])
        self.scheduler.reuse = self.watched[0]
        self.scheduler.tree.on_evicted = self.scheduler.reuse.publishing.evicted
        self.names = iter(range(10**6))

    def failures(self) -> list[str]:
        wrong = []
        try:
            self.play()
        except EscapedError as error:
            wrong.append(f"a: {error.__cause__!r}")
        except Exception as error:  # noqa: BLE001 - a finding
            wrong.append(f"b: {error!r}")
        return wrong

    def play(self) -> None:
        """Play everything; raises what is wrong."""
        try:
            try:
                self.script()
            finally:
                for each in self.watched:
                    each.calls = contextlib.nullcontext()
            self.aftermath()
        finally:
            if self.scheduler.link is not None:
                self.scheduler.link.close(weights_change=True)

    def rest(self) -> None:
        """Have stores written; ranks make as many calls."""
        if self.ranks is None:
            with contextlib.suppress(AssertionError):
                self.scheduler.rest()
            return
        for _ in range(8):
            self.scheduler.reuse.idle()

    def compare(self) -> None:
        """Ranks of which one has forgotten other texts evict others, and run apart."""
        if self.ranks is not None:
            self.reuse.publishing.settle()
            mine, other = self.ranks.gathered(order_of(self.scheduler))
            assert mine == other, "trees differ"

    def script(self) -> None:
        scheduler = self.scheduler
        a, b, c = _DOCUMENTS
        for document in (a, b, c):
            self.serve([*document, *self.new(3)], 2)
        self.serve([*self.new(12), *a[5:60], *self.new(20)], 9)
        self.serve([*self.new(30), *c[:50], *self.new(20), *b, *self.new(20)], 4, chunk=40)
        first = self.serve([*self.new(6), *b, *self.new(30)], 30)
        self.serve([*self.said(first), *self.new(20), *a, *self.new(9)], 4)
        self.serve([*self.said(first), *self.new(20)], 4, repair="before")
        scheduler.tree.evict(150)
        retracted = self.begin([*self.new(20), *c, *self.new(20)])
        for _ in range(3):
            self.go_on(retracted, 9)
        scheduler.retract(retracted)
        aborted = self.begin([*self.new(20), *b, *self.new(10)])
        scheduler.abort(aborted)
        scheduler.submit([*self.new(20), *a, *self.new(10)], "", "waiting")
        scheduler.match(scheduler.waiting[-1])
        scheduler.abort(scheduler.waiting[-1])
        self.finish(5)
        if scheduler.link is not None:
            scheduler.reuse.idle()
            self.rest()
        scheduler.tree.evict(500)
        for document in (b, a):
            self.serve([*self.new(20), *document, *self.new(10)], 3)
        scheduler.change_weights()
        self.serve([*a, *self.new(10)], 2)
        scheduler.flush()
        for document in (a, b):
            self.serve([*document, *self.new(3)], 2)
        self.serve([*self.new(20), *a, *b, *self.new(40)], 20)

    def aftermath(self) -> None:
        """Serve further requests, check between them, and see that they are grafted."""
        scheduler = self.scheduler
        self.finish(3)
        scheduler.check()
        self.compare()
        a, b, c = _DOCUMENTS
        for document in (a, c, b):
            self.serve([*document, *self.new(3)], 2)
            scheduler.check()
        scheduler.tree.evict(200)
        scheduler.check()
        for document in (b, c):
            self.serve([*document, *self.new(9)], 2)
        self.serve([*self.new(20), *b, *self.new(20)], 9)
        later = self.new(70)
        self.serve(later, 2)
        before = scheduler.copied_tokens
        self.serve([*self.new(20), *later, *self.new(20)], 9)
        assert scheduler.copied_tokens > before, "later requests are not grafted"
        scheduler.check()
        self.compare()
        assert self.reuse.books.num_requests == 0, "requests are left"
        assert not self.reuse.repairs.waiting
        scheduler.tree.empty()
        scheduler.check()
        scheduler.flush()
        scheduler.check()
        assert len(scheduler.tree.free_slots) == scheduler.tree.total, "slots are lost"

    def new(self, count: int) -> list[int]:
        return [100_000 + next(self.names) for _ in range(count)]

    def said(self, entry) -> list[int]:
        return entry.req.full_untruncated_fill_ids.tolist()

    def begin(self, tokens, repair: str = "after", chunk: int = 1000):
        scheduler = self.scheduler
        scheduler.now += 1.0
        scheduler.submit(tokens, "", "same id", repair)
        entry = scheduler.waiting[-1]
        assert scheduler.admit(entry, chunk), "there is room"
        return entry

    def go_on(self, entry, chunk: int) -> None:
        if entry not in self.scheduler.running:
            assert self.scheduler.admit(entry, chunk), "there is room"
        elif len(entry.row) < len(entry.req.origin_input_ids):
            self.scheduler.go_on(entry, chunk)
        else:
            self.scheduler.decode(entry, self.new(1)[0])

    def serve(self, tokens, answer: int, *, repair: str = "after", chunk: int = 1000):
        entry = self.begin(tokens, repair, chunk)
        self.end(entry, answer, chunk)
        return entry

    def end(self, entry, answer: int, chunk: int = 1000) -> None:
        for _ in range(_MOST_ROUNDS):
            if len(entry.req.output_ids) >= answer:
                self.scheduler.finish(entry)
                self.scheduler.reuse.publishing.settle()
                return
            self.go_on(entry, chunk)
        raise AssertionError("a request does not end")

    def finish(self, answer: int) -> None:
        for entry in [*self.scheduler.running, *self.scheduler.waiting]:
            self.end(entry, max(answer, len(entry.req.output_ids)))
