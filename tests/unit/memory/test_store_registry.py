"""Stores by name: built-in, registered in process, and from installed packages."""

from __future__ import annotations

import pytest

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM
from kvgraft.engine.loading import adopt_model
from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.memory import HostKVStore, create_store, register_store
from kvgraft.memory.store import registry
from kvgraft.testing.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


def install(monkeypatch, folder, entry, source=""):
    (folder / "toy_stores.py").write_text(source)
    info = folder / "toy_stores-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-stores\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[kvgraft.stores]\n{entry}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "toy_stores", raising=False)


def test_host_is_built_in():
    store = create_store("host", budget_bytes=77, pin_memory=True)
    assert (type(store), store.budget_bytes) == (HostKVStore, 77)


@pytest.mark.parametrize(("name", "remedy"), [("hots", "did you mean 'host'?"), ("disk", "known are host;")])
def test_an_unknown_name_is_told_in_one_line(name, remedy):
    with pytest.raises(ConfigError, match=r"kvgraft\.stores$") as raised:
        create_store(name, budget_bytes=1)
    assert f"unknown store '{name}'; {remedy}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_engine_does_not_start_with_an_unknown_store(family):
    with pytest.raises(ConfigError, match="unknown store 'disk'"):
        LLM(adopt_model(family, tiny_model(family), None), EngineConfig(num_slots=200, store="disk"))


@pytest.mark.parametrize("name", ["", " ", "host"])
def test_names_are_not_empty_and_not_taken(name):
    with pytest.raises(ConfigError):
        register_store(name, HostKVStore)


def test_a_package_offers_its_store(monkeypatch, tmp_path):
    source = "from kvgraft.memory import HostKVStore\nclass Toy(HostKVStore):\n    pass\n"
    install(monkeypatch, tmp_path, "toy = toy_stores:Toy\nbroken = toy_stores:Missing", source)
    for _ in range(2):
        assert type(create_store("toy", budget_bytes=5)).__name__ == "Toy"
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        create_store("toyy", budget_bytes=5)


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "broken = toy_stores:Missing")
    with pytest.raises(IntegrationError, match=r"'broken' \(toy_stores:Missing\) cannot be loaded"):
        create_store("broken", budget_bytes=5)
    assert create_store("host", budget_bytes=5).budget_bytes == 5


def test_what_is_no_store_is_refused():
    register_store("toy", lambda **_: {})
    with pytest.raises(IntegrationError, match="is a dict"):
        create_store("toy", budget_bytes=5)
