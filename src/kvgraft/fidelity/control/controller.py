"""Hold a stated risk while serving: per reuse class a notch, the evidence of its audits, and what follows from a breach.

A first breach makes a class one notch more conservative, a second one switches it off. Nothing ever becomes bolder again by
itself: that takes a new calibration. Decides only; who audits and who serves is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvgraft.fidelity.control.e_process import EProcess
from kvgraft.types import RiskStatement, RiskStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

OFF = 0
"""Index of the notch at which nothing approximate is served: full prefill."""


class RiskEvent(StrEnum):
    """What an audit brought about."""

    CERTIFIED = "certified"
    TIGHTENED = "tightened"
    SWITCHED_OFF = "switched_off"


@dataclass(frozen=True, slots=True)
class RiskTarget:
    """What is to hold: the mean of `loss` is at most `epsilon`, and the probability of being wrong about it at most `delta`.

    Attributes:
        loss: Its name, as `Loss` is written.
        epsilon: In (0, 1).
        delta: In (0, 1).
        notches: Names, from "full" at index 0 to the boldest.
    """

    loss: str
    epsilon: float
    delta: float
    notches: tuple[str, ...]


@dataclass(slots=True, eq=False)
class ClassRisk:
    """One reuse class at its present notch.

    Attributes:
        notch: Index of the notch.
        breaches: Alarms so far, at bolder notches.
        loss_sum: Of the audits at this notch.
        is_certified: The certificate was reached at this notch; it stays, because evidence may be looked at at any time.
        certify: Evidence for a risk below epsilon.
        alarm: Evidence for one above.
    """

    notch: int
    certify: EProcess
    alarm: EProcess
    breaches: int = 0
    loss_sum: float = 0.0
    is_certified: bool = False

    @property
    def audits(self) -> int:
        """At this notch."""
        return self.alarm.num_losses

    @classmethod
    def fresh(cls, notch: int, epsilon: float, breaches: int = 0) -> ClassRisk:
        """Begin without evidence."""
        return cls(notch, EProcess.certificate(epsilon), EProcess.alarm(epsilon), breaches)


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

    def audit(self, reuse_class: str, notch: int, loss: float) -> RiskEvent | None:
        """Take in the loss of an audited request; returns what follows from it.

        A request that was served at another notch than its class has by now says nothing about that one, and is left out.

        Args:
            reuse_class: Of the request.
            notch: Index of the notch that it was served at.
            loss: In [0, 1].
        """
        known = self.classes.setdefault(reuse_class, ClassRisk.fresh(self.start, self.target.epsilon))
        if notch != known.notch or notch == OFF:
            return None
        known.loss_sum += loss
        known.certify.update(loss)
        known.alarm.update(loss)
        if known.alarm.exceeds(self.target.delta):
            return self._tighten(reuse_class, known)
        if not known.is_certified and known.certify.exceeds(self.target.delta):
            known.is_certified = True
            return RiskEvent.CERTIFIED
        return None

    def statement(self, reuse_class: str) -> RiskStatement:
        """What may be said of requests of this class now."""
        known = self.classes.get(reuse_class) or ClassRisk.fresh(self.start, self.target.epsilon)
        status = RiskStatus.CALIBRATED
        if known.is_certified:
            status = RiskStatus.CERTIFIED
        elif known.breaches:
            status = RiskStatus.BREACHED
        target = self.target
        return RiskStatement(
            status, target.epsilon, target.delta, target.loss, target.notches[known.notch], known.audits
        )

    def statements(self) -> Mapping[str, RiskStatement]:
        """What may be said of every class that has been audited, by name."""
        return {name: self.statement(name) for name in sorted(self.classes)}

    def _tighten(self, reuse_class: str, known: ClassRisk) -> RiskEvent:
        notch = known.notch - 1 if known.breaches == 0 else OFF
        self.classes[reuse_class] = ClassRisk.fresh(notch, self.target.epsilon, known.breaches + 1)
        return RiskEvent.SWITCHED_OFF if notch == OFF else RiskEvent.TIGHTENED
