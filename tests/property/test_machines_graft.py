"""The state machines of the engine graft and repair: one that has its documents refused tests little of what it names."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.property.test_engine_batching import BatchingMachine, HybridMachine
from tests.property.test_engine_cache import EngineCacheMachine
from tests.property.test_engine_computed import ComputedMachine, HybridComputedMachine
from tests.property.test_engine_healing import EngineHealingMachine
from tests.property.test_engine_stores import EngineStoresMachine
from tests.property.test_engine_verified import VerifiedMachine

from kvgraft.engine.schedule.active import ActiveRequest
from kvgraft.types import RepairTime

MACHINES = [
    BatchingMachine,
    HybridMachine,
    EngineCacheMachine,
    ComputedMachine,
    HybridComputedMachine,
    EngineHealingMachine,
    EngineStoresMachine,
    VerifiedMachine,
]
"""Not `FewWindowsMachine`: grafts that it plans find no window slots, which is what it is for."""

pytestmark = pytest.mark.slow
_MOST_RUNS = 20
"""What hypothesis draws of one seed also depends on which modules are imported: no count of runs is known to do."""


@pytest.fixture
def finished(monkeypatch):
    """How many requests ended, how many of them after a graft, and how many with a repair after their first token."""
    seen = Counter()

    def noted(active, output=ActiveRequest.output):
        found = output(active)
        report = found.report
        seen["asked"] += 1
        seen["grafted"] += report.shifted_tokens > 0 or report.healing is not None
        repair = report.repair
        seen["repaired"] += repair is not None and (repair.time, repair.from_token) == (RepairTime.AFTER, 2)
        seen["corrected"] += report.corrected_tokens > 0
        return found

    monkeypatch.setattr(ActiveRequest, "output", noted)
    return seen


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_machine_grafts_and_repairs(machine, finished):
    """Soon, that is: of three examples, one run in three has no document quoted after it was read, or grafts off."""
    few = settings(machine.TestCase.settings, max_examples=3, database=None, phases=[Phase.generate])
    for number in range(_MOST_RUNS):
        run_state_machine_as_test(seed(number)(partial(machine)), settings=few)
        if finished["grafted"] >= 2 and finished["repaired"] and (finished["corrected"] or machine is VerifiedMachine):
            return
    raise AssertionError(finished)
