"""The evidence of a controller on disk, so that it survives restarts."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvgraft.errors import ConfigError, one_line
from kvgraft.fidelity.control.controller import ClassRisk, Evidence, RiskController
from kvgraft.fidelity.control.json_file import read_json, write_json
from kvgraft.fidelity.control.parts import AnswerPart

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from kvgraft.fidelity.control.controller import RiskTarget

logger = logging.getLogger(__name__)

STATE_VERSION = 2
"""Of the file; another version is not read."""


def save_state(path: Path, controller: RiskController, binding: Mapping[str, str]) -> None:
    """Write what the controller knows; `binding` says of which model and policy. Raises `OSError`."""
    write_json(
        path,
        {
            "version": STATE_VERSION,
            **_head(controller.target, controller.start, binding),
            "classes": {name: _class_as_dict(known) for name, known in sorted(controller.classes.items())},
        },
    )


def load_state(path: Path, target: RiskTarget, start: int, binding: Mapping[str, str]) -> RiskController:
    """Return a controller that knows what the file says, or a fresh one where there is none.

    A file that cannot be understood is moved to a name that ends in `.corrupt`, with a warning: serving goes on without its
    evidence.

    Raises:
        ConfigError: The file is about another model, policy or target.
    """
    if not path.exists():
        return RiskController(target, start)
    head = _head(target, start, binding)
    try:
        values = _versioned(path)
        others = [key for key, value in head.items() if values[key] != value]
        classes = {} if others else _classes(values["classes"], target)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _set_aside(path, error)
        return RiskController(target, start)
    if others:
        raise ConfigError(
            f"risk_state {path} holds audits of another {others[0]}; give another path, or remove the file to begin anew"
        )
    return RiskController(target, start, classes)


def _versioned(path: Path) -> dict[str, object]:
    values = read_json(path)
    if values.get("version") != STATE_VERSION:
        _refuse(f"version {values.get('version')!r} instead of {STATE_VERSION}")
    return values


def _head(target: RiskTarget, start: int, binding: Mapping[str, str]) -> dict[str, object]:
    return {
        **binding,
        "loss": target.loss,
        "epsilon": target.epsilon,
        "delta": target.delta,
        "notches": list(target.notches),
        "start": target.notches[start],
    }


def _class_as_dict(known: ClassRisk) -> dict[str, object]:
    return {
        "notch": known.notch,
        "breaches": known.breaches,
        "parts": {part.value: _evidence_as_dict(evidence) for part, evidence in sorted(known.parts.items())},
    }


def _evidence_as_dict(evidence: Evidence) -> dict[str, object]:
    return {
        "audits": evidence.audits,
        "loss_sum": evidence.loss_sum,
        "is_certified": evidence.is_certified,
        "certify": evidence.certify.log_wealth.tolist(),
        "alarm": evidence.alarm.log_wealth.tolist(),
    }


def _classes(values: object, target: RiskTarget) -> dict[str, ClassRisk]:
    if not isinstance(values, dict):
        _refuse("classes are no object")
    return {name: _class_of(known, target) for name, known in values.items()}


def _class_of(values: Mapping[str, Any], target: RiskTarget) -> ClassRisk:
    """Read one class; raises `ValueError`, `KeyError` or `TypeError` for what `_class_as_dict` would not write."""
    if not isinstance(values, dict):
        _refuse("a class is no object")
    notch, breaches, parts = _count(values["notch"]), _count(values["breaches"]), values["parts"]
    if notch >= len(target.notches):
        _refuse("a notch that does not exist")
    if not isinstance(parts, dict):
        _refuse("parts are no object")
    evidence = {AnswerPart(part): _evidence_of(known, target.epsilon) for part, known in parts.items()}
    return ClassRisk(notch, breaches, evidence)


def _evidence_of(values: Mapping[str, Any], epsilon: float) -> Evidence:
    """Read the evidence of one part; raises as `_class_of` does."""
    audits, loss_sum, is_certified = _count(values["audits"]), values["loss_sum"], values["is_certified"]
    if not isinstance(is_certified, bool):
        _refuse("a certificate that is neither there nor not")
    if not isinstance(loss_sum, int | float) or not 0 <= loss_sum <= audits:
        _refuse("losses that do not fit the audits")
    evidence = Evidence.none(epsilon)
    evidence.loss_sum, evidence.is_certified = float(loss_sum), is_certified
    for process, name in ((evidence.certify, "certify"), (evidence.alarm, "alarm")):
        process.num_losses, process.log_wealth = audits, _wealth(values[name], len(process.bets))
    return evidence


def _wealth(values: object, count: int) -> NDArray[np.float64]:
    wealth = np.asarray(values, np.float64)
    if wealth.shape != (count,) or not np.isfinite(wealth).all():
        _refuse(f"wealth that is no list of {count} numbers")
    return wealth


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _refuse("a count that is none")
    return value


def _refuse(problem: str) -> NoReturn:
    raise ValueError(problem)


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_name(path.name + ".corrupt")
    with contextlib.suppress(OSError):  # it is written anew then
        path.replace(aside)
    reason = one_line(error)
    logger.warning("risk_state %s cannot be used (%s); it is kept as %s, and audits begin anew", path, reason, aside)
