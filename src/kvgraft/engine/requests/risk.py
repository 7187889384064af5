"""At which notch the engine serves a graft, what it may say about it, and which requests are audited."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.engine.requests.repair import RepairRules
from kvgraft.errors import ConfigError, one_line
from kvgraft.graft.drift import drift_correction
from kvgraft.reuse.classes import ReuseClass
from kvgraft.reuse.decision import Sampled
from kvgraft.types import UNCALIBRATED, RepairTime, ReuseMode, RiskStatement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.config import EngineConfig
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.requests.request import Request
    from kvgraft.fidelity.control import AnswerPart, Calibration, Loss, RiskController
    from kvgraft.fidelity.control.notches import Notch
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy

logger = logging.getLogger(__name__)

OWN_SETTINGS = RiskStatement(
    reason="the request chose a policy, a correction or a time of repair of its own, which was not calibrated"
)
_MOST_LATEST = 50
"""Audits that are kept to be looked at."""
WITHDRAWN = RiskStatement(reason="what was calibrated is gone: the weights have changed")


@dataclass(frozen=True, slots=True)
class AuditFacts:
    """An audit of a part of an answer.

    Attributes:
        at: Unix time in seconds.
        request_id: What was audited.
        reuse_class: Of its graft.
        notch: Name of the notch that it was served at.
        part: Of the answer (`AnswerPart`).
        loss_kind: What counts as a loss, as `Loss` is written.
        loss: In [0, 1].
        event: What it brought about (`RiskEvent`), or empty.
    """

    at: float
    request_id: str
    reuse_class: str
    notch: str
    part: str
    loss_kind: str
    loss: float
    event: str


@dataclass(frozen=True, slots=True)
class Served:
    """Service of a graft.

    Attributes:
        policy: What it computes again; None if it must not be grafted.
        statement: What may be said about it.
        sampled: Set if it is to be audited.
        waits: Whether its first token has to wait for the policy's choice.
    """

    policy: SelectionPolicy | None
    statement: RiskStatement = UNCALIBRATED
    sampled: Sampled | None = None
    waits: bool = False


class HeldRisk:
    """Of an engine with a calibration: a notch per reuse class, as calibrated and as audits have left it. Not thread-safe.

    Only requests under the configured policy and correction are meant: what a request chooses for itself was not calibrated.

    Attributes:
        policy: What requests compute again that name no policy.
        loss: What counts as a loss; None without a calibration.
        latest: The last audits, the oldest first.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        binding: Mapping[str, str],
        correction: DriftCorrection | None,
        repair: RepairRules,
    ) -> None:
        self.policy = policy
        self._correction = correction
        self._repair = repair
        self.loss: Loss | None = None
        self.latest: deque[AuditFacts] = deque(maxlen=_MOST_LATEST)
        self._binding = dict(binding)
        self._notches: tuple[Notch, ...] = ()
        self._controller: RiskController | None = None
        self._nothing = UNCALIBRATED
        self._state_path: Path | None = None
        self._share = 0.0
        self._random = random.Random(0)

    @classmethod
    def configured(cls, config: EngineConfig, loaded: LoadedModel, policy: SelectionPolicy) -> HeldRisk:
        """Read the calibration and the audits so far that the settings name.

        Raises:
            ConfigError: One is about something else than what runs here, or a setting needs a calibration.
        """
        correction, repair = drift_correction(config.correction), RepairRules.configured(config)
        held = cls(policy, risk_binding(config, loaded, policy), correction, repair)
        if config.calibration:
            held._adopt(config)
            return held
        for name in ("audit_share", "risk_state"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} needs a calibration, which says what to hold; make one with 'kvgraft calibrate' and name it in "
                    "calibration"
                )
        logger.info("risk of grafted answers: uncalibrated; 'kvgraft calibrate' measures it on your own prompts")
        return held

    def _adopt(self, config: EngineConfig) -> None:
        # Nothing of risks is loaded in an engine that holds none.
        from kvgraft.fidelity.control import Loss, RiskController, RiskTarget, load_calibration, load_state
        from kvgraft.fidelity.control.notches import notches_of

        self._notches = notches_of(self.policy, self._repair.time)
        path = Path(config.calibration)
        calibration = load_calibration(path)
        calibration.require(self._binding, path)
        names = tuple(notch.name for notch in self._notches)
        if calibration.notches != names:
            raise ConfigError(
                f"calibration {path} has other notches ({', '.join(calibration.notches)}) than policy {self.policy.name} "
                f"here ({', '.join(names)}); run 'kvgraft calibrate' again"
            )
        start = names.index(calibration.notch)
        num_waiting = sum(notch.repair is RepairTime.BEFORE for notch in self._notches)
        target = RiskTarget(calibration.loss, calibration.epsilon, calibration.delta, names, num_waiting)
        self.policy = self._notches[start].policy or self.policy
        self.loss = Loss.parse(calibration.loss)
        self._share = config.audit_share
        self._state_path = Path(config.risk_state) if config.risk_state else None
        if self._state_path is None:
            self._controller = RiskController(target, start)
        else:
            self._controller = load_state(self._state_path, target, start, self._binding)
        logger.info("risk of grafted answers: %s", stated_by(calibration))

    @property
    def start(self) -> RiskStatement:
        """Statement about a class that was never audited."""
        if self._controller is None:
            return self._nothing
        from kvgraft.fidelity.control import PARTS  # loaded with the calibration

        return self._controller.statement("", PARTS[self._notches[self._controller.start].repair])

    def statements(self) -> Mapping[str, Mapping[str, RiskStatement]]:
        """Return the statements about each reuse class that was audited, by part of the answers (`AnswerPart`)."""
        return {} if self._controller is None else self._controller.statements()

    def is_meant(self, request: Request) -> bool:
        """Return whether statements are about this request: it is served as configured, and its answer is not verified.

        One that waits for the repair is meant where others do not: its row was calibrated, too.
        """
        is_configured = request.policy == self.policy and request.correction == self._correction
        is_timed = not request.repairs_after or request.repair == self._repair
        is_meant = is_configured and is_timed and request.reuse is not ReuseMode.VERIFIED
        return self._controller is not None and is_meant

    def stated(self, request: Request) -> RiskStatement:
        """Return the statement about a request of which nothing is grafted."""
        return self.start if self._controller is None or self.is_meant(request) else OWN_SETTINGS

    def may_go_on(self, request: Request) -> bool:
        """Return whether a request may go on from approximate K/V of an earlier one."""
        if self._controller is None or not self.is_meant(request):
            return True
        return self._notches[self._controller.notch(ReuseClass.CONTINUED)].policy is not None

    def serve(self, request: Request, name: ReuseClass) -> Served:
        """Decide how to serve a request of a reuse class, and whether to audit it.

        The sample is drawn here: with the same probability for all requests of a class, before anything is computed.
        """
        if not self.is_meant(request):
            return Served(request.policy, self.stated(request))
        assert self._controller is not None
        from kvgraft.fidelity.control import PARTS  # loaded with the calibration

        number = self._controller.notch(name)
        notch = self._notches[number]
        repair = notch.repair if request.repairs_after else RepairTime.BEFORE
        is_sampled = notch.policy is not None and self._random.random() < self._share
        sampled = Sampled(name, number, repair) if is_sampled else None
        statement = self._controller.statement(name, PARTS[repair])
        return Served(notch.policy, statement, sampled, waits=notch.repair is RepairTime.BEFORE)

    def audited(self, sampled: Sampled, losses: Mapping[AnswerPart, float], request_id: str = "") -> None:
        """Take in the losses of an audited request by part of its answer; what follows is logged and kept."""
        if self._controller is None:
            return
        notch = self._controller.target.notches[sampled.notch]
        for part, loss in losses.items():
            event = self._controller.audit(sampled.reuse_class, sampled.notch, loss, part)
            facts = (sampled.reuse_class, notch, part.value, str(self.loss), loss, event or "")
            self.latest.append(AuditFacts(time.time(), request_id, *facts))
            if event is not None:
                statement = self._controller.statement(sampled.reuse_class, (part,))
                logger.warning("risk of grafts %s: %s, now %s", sampled.reuse_class, event, statement)
        if self._state_path is not None:
            self._save(self._state_path, self._controller)

    def withdraw(self, reason: str) -> None:
        """State nothing any more: what was calibrated and audited is gone."""
        if self._controller is not None:
            logger.warning("risk of grafted answers: uncalibrated from here on, because %s", reason)
            self._nothing = WITHDRAWN
        self._controller = None
        self.latest.clear()

    def _save(self, path: Path, controller: RiskController) -> None:
        from kvgraft.fidelity.control import save_state  # loaded with the calibration

        try:
            save_state(path, controller, self._binding)
        except OSError as error:
            logger.warning(
                "risk_state %s cannot be written (%s); audits so far are lost at the end", path, one_line(error)
            )
            self._state_path = None


def risk_binding(config: EngineConfig, loaded: LoadedModel, policy: SelectionPolicy) -> dict[str, str]:
    """Return what a calibration holds for: everything that decides which K/V are grafted and how far off they are."""
    correction = drift_correction(config.correction)
    return {
        "model": loaded.fingerprint,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "policy": policy.name,
        "policy version": str(policy.version),
        "correction": config.correction,
        "correction version": "0" if correction is None else str(correction.version),
        "repair": config.repair,
        "repair_below_margin": f"{config.repair_below_margin:g}",
        "repair_rows": str(config.repair_rows),
        "min_run": str(config.min_run),
        "max_generation": str(config.max_generation),
    }


def stated_by(calibration: Calibration) -> str:
    """Say in one line what a calibration states."""
    if calibration.notch == calibration.notches[0]:
        return f"no notch kept {calibration.loss} at {calibration.epsilon:.3g}, so nothing is grafted"
    return (
        f"{calibration.loss} at most {calibration.epsilon:.3g} at notch {calibration.notch!r}, wrong with probability "
        f"{calibration.delta:.3g}, on traffic like {calibration.prompts} prompts of {calibration.date}"
    )
