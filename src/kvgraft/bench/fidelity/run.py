"""Take a suite through the instrument: what is read, measured and controlled, in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.bench.fidelity.measure import Instrument, figures_of
from kvgraft.bench.fidelity.noise import NoiseFloor
from kvgraft.bench.fidelity.sample import DrawnRequests, blocks, draw
from kvgraft.bench.fidelity.split import split
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.fidelity.request import FidelityRequest
    from kvgraft.bench.fidelity.sample import SampledRequest
    from kvgraft.bench.fidelity.settings import Setting
    from kvgraft.bench.fidelity.subject import Subject
    from kvgraft.bench.fidelity.suites import Suite
    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """A suite, the requests of its chosen half, and the sample of these that is measured."""

    suite: Suite
    requests: tuple[FidelityRequest, ...]
    sample: DrawnRequests


def plan_suite(suite: Suite, subject: Subject, *, side: str, limit: int, seed: int) -> SuitePlan:
    """Choose half and sample.

    Raises:
        ConfigError: Nothing is left to measure.
    """
    requests = tuple(split(suite.requests, side))
    sample = draw(requests, limit, subject.fits, seed)
    if not sample.indices:
        reason = f"{sample.too_long} prompts are longer than {subject.longest} tokens" if requests else "it is empty"
        raise ConfigError(
            f"suite {suite.name!r} has no request to measure ({reason}); raise --max-prompt-tokens and --num-slots, or "
            "choose another suite or --split"
        )
    return SuitePlan(suite, requests, sample)


class SuiteRunner:
    """Measures planned suites with one model.

    Args:
        llm: The model.
        subject: Its prompts and answers.
        settings: What is compared.
        num_controls: Requests per suite that get controls: the first ones of the sample.
        seed: Of the scrambled prompts.
    """

    def __init__(
        self, llm: LLM, subject: Subject, settings: Sequence[Setting], *, num_controls: int, seed: int
    ) -> None:
        self._llm = llm
        self._subject = subject
        self._instrument = Instrument(llm, subject, settings)
        self._noise = NoiseFloor(llm)
        self._num_controls = num_controls
        self._seed = seed

    @property
    def noise_dtype(self) -> str:
        """The number format that the noise floor is measured in."""
        return self._noise.name

    def run(self, plan: SuitePlan, journal: Journal, advance: Callable[[], object]) -> None:
        """Measure what the journal does not have yet; `advance` is called once per request."""
        controlled = set(plan.sample.indices[: self._num_controls])
        for block in blocks(plan.requests, plan.sample.indices, self._subject.fits):
            pending = [step.index for step in block if (plan.suite.name, step.index) not in journal]
            self._llm.reset()
            for step in block:
                if pending and step.index <= pending[-1]:
                    is_controlled = step.index in controlled
                    self._take(plan.suite, step, journal, is_pending=step.index in pending, is_controlled=is_controlled)
                advance()

    def _take(
        self, suite: Suite, step: SampledRequest, journal: Journal, *, is_pending: bool, is_controlled: bool
    ) -> None:
        instrument = self._instrument
        for donor in step.donors:
            instrument.read(donor)
        if not is_pending:
            if step.is_read:
                instrument.read(step.request.prompt)
            return
        asked = instrument.ask(step.request, suite.metric)
        record: dict[str, Any] = {"suite": suite.name} | instrument.measure(step, asked)
        controls = {}
        if is_controlled:
            controls["noise"] = figures_of(self._noise.measure(asked))
            scrambled = step.request.scrambled(random.Random(f"{self._seed} {step.index}"))
            unseen = instrument.ask(step.request, suite.metric, scrambled)
            controls["negative"] = instrument.control(unseen, ReuseMode.GRAFT)
        if step.is_read or is_controlled:
            instrument.read(step.request.prompt)
        if is_controlled:
            controls["exact"] = instrument.control(asked, ReuseMode.EXACT)
        journal.add(record | {"controls": controls})
