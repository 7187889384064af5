"""Take requests through an instrument in order of arrival: and what is read before and after each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.bench.deadline import Deadline
from kvgraft.bench.fidelity.sample import SampledRequest, blocks, draw
from kvgraft.bench.fidelity.split import split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvgraft.bench.fidelity.measure import Instrument
    from kvgraft.bench.fidelity.subject import Subject
    from kvgraft.bench.fidelity.suites import Suite
    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM

READ_FIRST = 8
"""Prompts that are read before the first of a row of consecutive requests."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The measured requests of a suite.

    Attributes:
        suite: The suite.
        blocks: Steps that share one cache, block by block.
        too_long: Requests that were drawn and left out for their length.
    """

    suite: Suite
    blocks: tuple[tuple[SampledRequest, ...], ...]
    too_long: int

    @property
    def indices(self) -> list[int]:
        """Of its requests in their suite, in order."""
        return [step.index for block in self.blocks for step in block]

    def all_read(self) -> Walk:
        """Return it with every request read after its measurement: for methods that leave its text in the cache."""
        return replace(
            self, blocks=tuple(tuple(replace(step, is_read=True) for step in block) for block in self.blocks)
        )


def drawn(suite: Suite, subject: Subject, *, side: str, limit: int, seed: int) -> Walk:
    """Choose requests at random; before each, earlier ones with its documents are read (`fidelity.sample`)."""
    requests = tuple(split(suite.requests, side))
    sample = draw(requests, limit, subject.fits, seed)
    steps = blocks(requests, sample.indices, subject.fits)
    return Walk(suite, tuple(map(tuple, steps)), sample.too_long)


def consecutive(suite: Suite, subject: Subject, *, limit: int, seed: int) -> Walk:
    """Choose requests that arrived one after another, where no names of documents say which belong together.

    `READ_FIRST` requests before them are read first.
    """
    fitting = [index for index, request in enumerate(suite.requests) if subject.fits(request.prompt)]
    last = max(0, len(fitting) - limit)
    first = random.Random(seed).randint(min(READ_FIRST, last), last)
    read = tuple(suite.requests[index].prompt for index in fitting[max(0, first - READ_FIRST) : first])
    chosen = fitting[first : first + limit]
    steps = tuple(
        SampledRequest(index, suite.requests[index], () if number else read, is_read=True)
        for number, index in enumerate(chosen)
    )
    return Walk(suite, (steps,) if steps else (), len(suite.requests) - len(fitting))


def in_turns(walks: Sequence[Walk]) -> list[Walk]:
    """Return their blocks, each as a walk of its own, so ordered that all suites are measured to about the same share."""
    blocks = [
        (number / len(walk.blocks), order, Walk(walk.suite, (block,), walk.too_long))
        for order, walk in enumerate(walks)
        for number, block in enumerate(walk.blocks)
    ]
    return [walk for _, _, walk in sorted(blocks, key=lambda each: each[:2])]


def pending_steps(
    walks: Sequence[Walk],
    llm: LLM,
    instrument: Instrument,
    journal: Journal,
    advance: Callable[[], object],
    *,
    minutes: float = 0.0,
) -> Iterator[tuple[Suite, SampledRequest, Sequence[str]]]:
    """Yield what the journal does not have, with its suite and the prompts that have been read; ends after so many minutes.

    Each block begins with an empty cache. Blocks of suites come in turns, so that these are measured to about the same share.
    """
    deadline = Deadline.after(60 * minutes or math.inf)
    for walk in in_turns(walks):
        for step, read in _pending_steps(walk, llm, instrument, journal, advance):
            if deadline.is_over:
                return
            yield walk.suite, step, read


def _pending_steps(
    walk: Walk, llm: LLM, instrument: Instrument, journal: Journal, advance: Callable[[], object]
) -> Iterator[tuple[SampledRequest, Sequence[str]]]:
    for block in walk.blocks:
        pending = [step.index for step in block if (walk.suite.name, step.index) not in journal]
        llm.reset()
        read: list[str] = []
        for step in block:
            if pending and step.index <= pending[-1]:
                for donor in step.donors:
                    instrument.read(donor)
                    read.append(donor)
                if step.index in pending:
                    yield step, tuple(read)
                if step.is_read:
                    instrument.read(step.request.prompt)
                    read.append(step.request.prompt)
            advance()
