"""Which connectors may stand beside ours is decided before any is built."""

from __future__ import annotations

import pytest

from kvgraft.errors import ConfigError
from kvgraft.integrations.vllm.known_stores import check_stores

OURS, LMCACHE, OTHER = ({"kv_connector": name} for name in ("GraftConnector", "LMCacheMPConnector", "OtherConnector"))


@pytest.mark.parametrize("connectors", [(OURS, LMCACHE), (LMCACHE, OURS), (OURS, LMCACHE, LMCACHE)], ids=str)
def test_known_stores_stand_beside_grafts(connectors):
    check_stores({"connectors": connectors})


def test_an_operator_may_answer_for_another_one():
    check_stores({"connectors": (OURS, OTHER), "saves_by_metadata": ["OtherConnector"]})


def configured(setting):
    return {**LMCACHE, "kv_connector_extra_config": {setting: True}}


@pytest.mark.parametrize(
    ("connectors", "reason"),
    [
        ((), "GraftConnector once and at least one store, not none"),
        ((OURS,), "GraftConnector alone needs no GraftMultiConnector"),
        ((OURS, OURS, LMCACHE), "GraftConnector once"),
        ((LMCACHE, LMCACHE), "GraftConnector once"),
        ((OURS, OTHER), "answer for it with 'saves_by_metadata': ['OtherConnector']"),
        ((OURS, {"kv_connector": "NixlConnector"}), "NixlConnector is not known to save only what its metadata name"),
        ((OURS, {"kv_connector": "MultiConnector"}), "name its connectors directly"),
        ((OURS, {"kv_connector": "GraftMultiConnector"}), "name its connectors directly"),
        ((OURS, configured("lmcache.mp.lazy_offload")), "cannot stand beside grafts with lmcache.mp.lazy_offload"),
        ((OURS, configured("lmcache.mp.transfer_intermediate_tensors")), "the whole batch"),
    ],
)
def test_others_are_refused_in_one_line_with_the_remedy(connectors, reason):
    with pytest.raises(ConfigError, match=r".") as raised:
        check_stores({"connectors": connectors})
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
