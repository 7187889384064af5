"""Tables of factories by name, used by several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest

from kvgraft import factories
from kvgraft.errors import ConfigError
from kvgraft.factories import NamedFactories

GROUP = "kvgraft.tests_of_factories"


@pytest.fixture
def table(monkeypatch):
    yield NamedFactories("thing", GROUP, "register_thing", {"built_in": int})
    del factories._TABLES[GROUP]


def offer(monkeypatch, load):
    entry = SimpleNamespace(name="mine", value="my:thing", load=load)
    monkeypatch.setattr(factories, "entry_points", lambda group: [entry] if group == GROUP else [])


def test_first_uses_at_once_find_the_same_factory(monkeypatch, table):
    both = Barrier(2)

    def load():
        both.wait(60)  # nobody has registered it yet
        return lambda: None

    offer(monkeypatch, load)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(table.find, ["mine", "mine"]))
    assert found[0] is found[1] is table.find("mine")


def test_a_module_may_register_its_factory_when_it_is_imported(monkeypatch, table):
    def load():
        table.register("mine", str)
        return str

    offer(monkeypatch, load)
    assert table.find("mine") is str
    with pytest.raises(ConfigError, match="registered already"):
        table.register("mine", str)
