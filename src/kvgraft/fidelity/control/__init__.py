"""Risk that is stated and held: tests of a sample, evidence that may be looked at any time, and a controller. NumPy only.

docs/risk.md says what may be promised.

Public modules: `notches`.
"""

from __future__ import annotations

from kvgraft.fidelity.control.calibration import (
    Calibration,
    NotchResult,
    PartResult,
    load_calibration,
    save_calibration,
)
from kvgraft.fidelity.control.controller import OFF, ClassRisk, Evidence, RiskController, RiskEvent, RiskTarget
from kvgraft.fidelity.control.e_process import EProcess
from kvgraft.fidelity.control.learn_then_test import fixed_sequence
from kvgraft.fidelity.control.loss import Loss, LossKind
from kvgraft.fidelity.control.p_values import LossSample, clopper_pearson, hoeffding_bentkus, trials_needed
from kvgraft.fidelity.control.parts import PARTS, AnswerPart
from kvgraft.fidelity.control.state_file import load_state, save_state

__all__ = [
    "OFF",
    "PARTS",
    "AnswerPart",
    "Calibration",
    "ClassRisk",
    "EProcess",
    "Evidence",
    "Loss",
    "LossKind",
    "LossSample",
    "NotchResult",
    "PartResult",
    "RiskController",
    "RiskEvent",
    "RiskTarget",
    "clopper_pearson",
    "fixed_sequence",
    "hoeffding_bentkus",
    "load_calibration",
    "load_state",
    "save_calibration",
    "save_state",
    "trials_needed",
]
