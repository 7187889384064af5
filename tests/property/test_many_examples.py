"""State machines of the engine with as many examples as have found faults; `make test` draws fewer, new ones by commit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.property.test_engine_batching import BatchingMachine, FewWindowsMachine, HybridMachine
from tests.property.test_engine_computed import ComputedMachine, HybridComputedMachine, StateComputedMachine
from tests.property.test_engine_healing import EngineHealingMachine
from tests.property.test_engine_stores import EngineStoresMachine
from tests.property.test_engine_verified import VerifiedMachine
from tests.property.test_host_tier import HostStatesMachine, HostTierMachine
from tests.property.test_sessions import SessionsMachine

EXAMPLES = {
    BatchingMachine: 7,
    FewWindowsMachine: 7,
    HybridMachine: 7,
    ComputedMachine: 10,
    HybridComputedMachine: 7,
    StateComputedMachine: 7,
    EngineHealingMachine: 7,
    EngineStoresMachine: 5,
    VerifiedMachine: 6,
    HostStatesMachine: 3,
    HostTierMachine: 5,
    SessionsMachine: 7,
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("machine", EXAMPLES, ids=lambda machine: machine.__name__)
def test_a_machine_holds(machine):
    run_state_machine_as_test(machine, settings=settings(machine.TestCase.settings, max_examples=EXAMPLES[machine]))
