"""The isolation that `kvgraft.testing` ships: registries are afterwards what they were before."""

from __future__ import annotations

import pytest

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.graft.select import NoRecompute, policy_names, register_selection_policy
from kvgraft.memory import open_stores, register_store
from kvgraft.prefix import EVICTION_POLICIES, RadixCache, get_radix_cache_factory, register_radix_cache_backend
from kvgraft.testing import registries
from kvgraft.testing.registries import isolated_registries


def test_what_is_registered_within_is_forgotten():
    with isolated_registries():
        register_radix_cache_backend("mine", RadixCache)
        register_store("mine", lambda where, options: None)
        EVICTION_POLICIES["mine"] = EVICTION_POLICIES["lru"]
        register_selection_policy("mine", NoRecompute)
        with pytest.raises(IntegrationError, match="is a NoneType"):
            open_stores("mine:here")
    assert get_radix_cache_factory("mine") is None
    assert "mine" not in {*EVICTION_POLICIES, *policy_names()}
    with pytest.raises(ConfigError, match="unknown KV store 'mine'"):
        open_stores("mine:here")


def test_what_was_there_is_there_again_after_an_error():
    register_radix_cache_backend("outer", RadixCache)
    lru = EVICTION_POLICIES["lru"]

    def fail():
        with isolated_registries():
            EVICTION_POLICIES.clear()
            raise KeyError("a test fails")

    with pytest.raises(KeyError):
        fail()
    assert EVICTION_POLICIES["lru"] is lru
    assert get_radix_cache_factory("outer") is RadixCache


def test_they_nest():
    with isolated_registries():
        register_radix_cache_backend("outer", RadixCache)
        with isolated_registries():
            register_radix_cache_backend("inner", RadixCache)
        assert get_radix_cache_factory("outer") is RadixCache
        assert get_radix_cache_factory("inner") is None


def test_each_table_is_found():
    assert len(list(registries._tables())) == len(registries._REGISTRIES)


def test_without_torch_the_others_are_kept(monkeypatch):
    """Prefix caches are developed where numpy is all there is."""
    import_module = registries.importlib.import_module

    def without_torch(name):
        if name.startswith(("kvgraft.memory", "kvgraft.graft")):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return import_module(name)

    monkeypatch.setattr(registries.importlib, "import_module", without_torch)
    with isolated_registries():
        register_radix_cache_backend("mine", RadixCache)
    assert get_radix_cache_factory("mine") is None


@pytest.mark.parametrize("first", [True, False])
def test_each_test_begins_with_what_is_built_in(first):
    assert get_radix_cache_factory("left over") is None, first
    register_radix_cache_backend("left over", RadixCache)
