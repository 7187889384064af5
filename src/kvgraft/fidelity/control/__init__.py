"""Risk that is stated and held: tests of a sample, evidence that may be looked at any time, and a controller. NumPy only.

docs/risk.md says what may be promised.
"""

from __future__ import annotations

from kvgraft.fidelity.control.controller import OFF, ClassRisk, RiskController, RiskEvent, RiskTarget
from kvgraft.fidelity.control.e_process import EProcess
from kvgraft.fidelity.control.learn_then_test import fixed_sequence
from kvgraft.fidelity.control.loss import Loss, LossKind
from kvgraft.fidelity.control.p_values import clopper_pearson, hoeffding_bentkus, trials_needed, upper_limit
from kvgraft.fidelity.control.state_file import load_state, save_state

__all__ = [
    "OFF",
    "ClassRisk",
    "EProcess",
    "Loss",
    "LossKind",
    "RiskController",
    "RiskEvent",
    "RiskTarget",
    "clopper_pearson",
    "fixed_sequence",
    "hoeffding_bentkus",
    "load_state",
    "save_state",
    "trials_needed",
    "upper_limit",
]
