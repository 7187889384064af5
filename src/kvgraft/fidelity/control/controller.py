"""Hold a stated risk while serving: per reuse class a notch, the evidence of its audits, and what follows from a breach.

A first breach makes a class more conservative, a second one switches it off: by one notch, and where the first token is the
part that breached, to a notch at which it waits for the repair, because others do not change it. Nothing ever becomes bolder
again by itself: that takes a new calibration. Decides only; who audits and who serves is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvgraft.fidelity.control.e_process import EProcess
from kvgraft.fidelity.control.parts import AnswerPart
from kvgraft.types import RiskStatement, RiskStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OFF = 0
"""Index of the notch at which nothing approximate is served: full prefill."""


class RiskEvent(StrEnum):
    """A change that an audit caused."""

    CERTIFIED = "certified"
    TIGHTENED = "tightened"
    SWITCHED_OFF = "switched_off"


@dataclass(frozen=True, slots=True)
class RiskTarget:
    """The promise: the mean of `loss` is at most `epsilon`, and the probability of being wrong about it at most `delta`.

    Attributes:
        loss: Its name, as `Loss` is written.
        epsilon: In (0, 1).
        delta: In (0, 1).
        notches: Names, from "full" at index 0 to the boldest.
        num_waiting: How many of them, from the first on, let the first token wait for the repair; None for all.
    """

    loss: str
    epsilon: float
    delta: float
    notches: tuple[str, ...]
    num_waiting: int | None = None


@dataclass(slots=True, eq=False)
class Evidence:
    """Audits of one part of the answers of a reuse class, at its present notch.

    Attributes:
        certify: Evidence for a risk below epsilon.
        alarm: Evidence for one above.
        loss_sum: Of the audits.
        is_certified: The certificate was reached; it stays, because evidence may be looked at at any time.
    """

    certify: EProcess
    alarm: EProcess
    loss_sum: float = 0.0
    is_certified: bool = False

    @classmethod
    def none(cls, epsilon: float) -> Evidence:
        """Begin without audits."""
        return cls(EProcess.certificate(epsilon), EProcess.alarm(epsilon))

    @property
    def audits(self) -> int:
        """How many there were."""
        return self.alarm.num_losses

    def add(self, loss: float) -> None:
        """Take in the loss of an audit."""
        self.loss_sum += loss
        self.certify.update(loss)
        self.alarm.update(loss)


@dataclass(slots=True, eq=False)
class ClassRisk:
    """One reuse class at its present notch.

    Attributes:
        notch: Index of the notch.
        breaches: Alarms so far, at bolder notches.
        parts: Evidence of each part of its answers that has been audited.
    """

    notch: int
    breaches: int = 0
    parts: dict[AnswerPart, Evidence] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RiskController:
    """Notches of all reuse classes of one model under one policy. Not thread-safe.

    Attributes:
        target: What is to hold.
        start: Notch at which classes begin: the calibrated one.
        classes: What is known of classes that have been audited.
    """

    target: RiskTarget
    start: int
    classes: dict[str, ClassRisk] = field(default_factory=dict)

    def notch(self, reuse_class: str) -> int:
        """Index of the notch that requests of this class are served at; `OFF` for none."""
        known = self.classes.get(reuse_class)
        return self.start if known is None else known.notch

    def audit(self, reuse_class: str, notch: int, loss: float, part: AnswerPart = AnswerPart.WHOLE) -> RiskEvent | None:
        """Take in the loss of a part of an audited answer; returns what follows from it.

        A request that was served at another notch than its class has by now says nothing about that one, and is left out.

        Args:
            reuse_class: Of the request.
            notch: Index of the notch that it was served at.
            loss: In [0, 1].
            part: Of the answer.
        """
        known = self.classes.setdefault(reuse_class, ClassRisk(self.start))
        if notch != known.notch or notch == OFF:
            return None
        evidence = known.parts.setdefault(part, Evidence.none(self.target.epsilon))
        evidence.add(loss)
        if evidence.alarm.exceeds(self.target.delta):
            return self._tighten(reuse_class, known, part)
        if not evidence.is_certified and evidence.certify.exceeds(self.target.delta):
            evidence.is_certified = True
            return RiskEvent.CERTIFIED
        return None

    def statement(self, reuse_class: str, parts: Iterable[AnswerPart] = (AnswerPart.WHOLE,)) -> RiskStatement:
        """Return what may be said now of answers with these `parts`, at least one: of the part of which least is known."""
        known = self.classes.get(reuse_class) or ClassRisk(self.start)
        none = Evidence.none(self.target.epsilon)
        found = {part: known.parts.get(part, none) for part in parts}
        weakest = min(found, key=lambda part: (found[part].is_certified, float(found[part].certify.log_e)))
        return self._stated(known, weakest, found[weakest])

    def statements(self) -> Mapping[str, Mapping[str, RiskStatement]]:
        """Return what may be said of every class that has been audited, by its name and the part of its answers.

        A class without evidence at its present notch has a statement of whole answers.
        """
        none = {AnswerPart.WHOLE: Evidence.none(self.target.epsilon)}
        return {
            name: {part.value: self._stated(known, part, found) for part, found in (known.parts or none).items()}
            for name, known in sorted(self.classes.items())
        }

    def _stated(self, known: ClassRisk, part: AnswerPart, evidence: Evidence) -> RiskStatement:
        status = RiskStatus.CALIBRATED
        if evidence.is_certified:
            status = RiskStatus.CERTIFIED
        elif known.breaches:
            status = RiskStatus.BREACHED
        target = self.target
        return RiskStatement(
            status,
            target.epsilon,
            target.delta,
            target.loss,
            target.notches[known.notch],
            evidence.audits,
            part=part.value,
        )

    def _tighten(self, reuse_class: str, known: ClassRisk, part: AnswerPart) -> RiskEvent:
        notch = OFF if known.breaches else known.notch - 1
        if part is AnswerPart.FIRST and self.target.num_waiting is not None:
            notch = min(notch, self.target.num_waiting - 1)
        self.classes[reuse_class] = ClassRisk(notch, known.breaches + 1)
        return RiskEvent.SWITCHED_OFF if notch == OFF else RiskEvent.TIGHTENED
