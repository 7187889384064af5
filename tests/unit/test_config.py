from __future__ import annotations

import pytest

from kvgraft.config import EngineConfig
from kvgraft.errors import ConfigError


def test_environment_sets_typed_values():
    config = EngineConfig.from_env(environ={"KVGRAFT_NUM_SLOTS": "128", "KVGRAFT_RECOMPUTE_RATIO": "0.2", "OTHER": "1"})
    assert (config.num_slots, config.recompute_ratio) == (128, 0.2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_slot": 1}, "unknown setting 'num_slot'"),
        ({"num_slots": "many"}, "num_slots must be a int"),
        ({"num_slots": -1}, "at least 0"),
        ({"recompute_ratio": 0.0}, "recompute_ratio"),
        ({"min_run": 4}, "at least 16"),
    ],
)
def test_bad_value_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict(values)
