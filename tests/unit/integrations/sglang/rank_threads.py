"""Ranks of tensor parallelism as threads of one process. Whoever makes another exchange than the others fails at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvgraft.integrations.sglang.planning.ranks import Chosen, Ranks
from kvgraft.reuse.together import Together
from kvgraft.types import CONTINUATION

SOON = 60.0


class FailsElsewhere(Ranks):
    """The ranks of which another one fails, in what this one does just then, as long as `is_failing()`."""

    def __init__(self, is_failing=lambda: True):
        def lowest(numbers):
            well, here, *others = numbers
            return [min(well, here >> 32) if is_failing() else well, here, *others]

        self.together = Together(lowest)


class ThreadRanks:
    """`Ranks` whose exchanges are those of `TensorParallelRanks`, one after the other; `keeper` knows this one's donors."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.size, self._slots, self._barrier, self.keeper = rank, len(slots), slots, barrier, None
        self.num_exchanges = 0
        self.together = Together(self._lowest)

    def exchanged(self, name, part):
        self.together.meet(name)
        return self._swapped(part)

    def _swapped(self, part):
        self._barrier.wait(SOON)
        self._slots[self.rank] = part
        self._barrier.wait(SOON)
        self.num_exchanges += 1
        return list(self._slots)

    def _lowest(self, numbers):
        parts = self._swapped(list(numbers))
        failed, *places = (min(column) for column in zip(*parts, strict=True))
        # Where no rank has failed, none may be elsewhere.
        assert failed < 1 << 30 or places[0] == -places[1], "ranks wait for one another in different places"
        return [failed, *places]

    def gathered(self, part):
        return self.exchanged("gathered", part)

    def shared(self, make):
        return self.exchanged("shared", make() if self.rank == 0 else None)[0]

    def lowest(self, numbers):
        parts = self.exchanged(f"lowest of {len(numbers)}", list(numbers))
        return [min(column) for column in zip(*parts, strict=True)]

    def total(self, numbers):
        return sum(self.exchanged(f"total of {len(numbers)}", numbers))

    def chosen(self, spans, donors, goes_on=None):
        def donor_of(donor_id):
            return goes_on if donor_id == CONTINUATION else self.keeper.catalogue.get(donor_id)

        parts = self.exchanged("chosen", (spans, donors))
        spans, are_alike = parts[0][0], len({donors for _, donors in parts}) == 1
        if not are_alike:
            return Chosen(None, are_alike=False)
        return Chosen(spans and tuple(replace(span, donor=donor_of(span.donor.donor_id)) for span in spans))


def on_ranks(size, program):
    """Call `program(ranks)` on every rank of one server; returns what each says. One that fails ends the others."""
    slots, barrier = [None] * size, threading.Barrier(size)

    def run(rank):
        ranks = ThreadRanks(rank, slots, barrier)
        try:
            result = program(ranks)
            ranks.exchanged("the end", None)
        except BaseException:
            barrier.abort()
            raise
        return result

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(run, rank) for rank in range(size)]
    broken = [error for each in done if (error := each.exception()) is not None]
    for error in sorted(broken, key=_is_consequence):
        raise error  # the cause, not what it broke
    return [each.result() for each in done]


def _is_consequence(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, threading.BrokenBarrierError)
