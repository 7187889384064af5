"""Tables of factories by name, used by several threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
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


def test_what_is_built_in_may_be_imported_when_it_is_asked_for(table):
    del factories._TABLES[GROUP]
    table = NamedFactories("thing", GROUP, "register_thing", {"later": "fractions:Fraction", "built_in": int})
    assert (table.names, table.added, dict(table.by_name)) == (("later", "built_in"), set(), {"built_in": int})
    with pytest.raises(ConfigError, match="'later' is registered already"):
        table.register("later", str)
    assert table.find("later") is table.find("later") is Fraction
    table.register("mine", str)
    assert (table.names, table.added) == (("later", "built_in", "mine"), {"mine"})
    with pytest.raises(ConfigError, match="did you mean 'later'"):
        table.find("latter")


def test_policies_are_imported_when_they_are_used():
    program = (
        "import sys\nfrom kvgraft.graft.select import policy_class, policy_names\n"
        "assert 'adaptive' in policy_names() and 'kvgraft.graft.select.adaptive' not in sys.modules\n"
        "assert policy_class('adaptive').__module__ == 'kvgraft.graft.select.adaptive'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
