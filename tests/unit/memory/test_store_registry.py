"""Stores by URL: built-in, registered in process, and from installed packages."""

from __future__ import annotations

import pytest

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.memory import KVStore, open_stores, register_store

SOURCE = """
from kvgraft.memory import KVStore
class Toy(KVStore):
    name = "toy"
    def __init__(self, where, options): self.where, self.options, self.is_closed = where, dict(options), False
    def put(self, space, key, head, body): return True
    def keys(self, space): return frozenset()
    def heads(self, space, keys): return iter(())
    def read(self, space, key, offset, into): pass
    def remove(self, space, key): pass
    def touch(self, space, keys): pass
    def close(self): self.is_closed = True
"""


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed package that offers `toy`, and `broken`, which cannot be imported."""
    (tmp_path / "toy_stores.py").write_text(SOURCE)
    info = tmp_path / "toy_stores-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-stores\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvgraft.stores]\ntoy = toy_stores:Toy\nbroken = toy_stores:Missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "toy_stores", raising=False)


@pytest.mark.parametrize("setting", ["host", " host ", "", "host,"])
def test_host_memory_alone_is_no_store(setting):
    assert open_stores(setting) == ()


def test_a_package_offers_its_store(package):
    one, other = open_stores("host, toy:/a/b?x=1&y=two words, toy:elsewhere")
    assert isinstance(one, KVStore)
    assert (one.where, one.options) == ("/a/b", {"x": "1", "y": "two words"})
    assert (other.where, other.options) == ("elsewhere", {})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tyo:here", "did you mean 'toy'"),
        ("toy", "says not where it is"),
        ("toy:here?x", "cannot be read"),
        ("toy:here,toy:here", "names a store twice"),
        ("toy:here?,nothing:at all", "unknown KV store 'nothing'"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(package, setting, message):
    with pytest.raises(ConfigError, match=message) as raised:
        open_stores(setting)
    assert "\n" not in str(raised.value)


def test_a_package_that_cannot_be_loaded_is_named_and_what_was_open_is_closed(package, monkeypatch):
    opened = []
    register_store("first", lambda where, options: opened.append(open_stores(f"toy:{where}")[0]) or opened[0])
    with pytest.raises(IntegrationError, match=r"'broken' \(toy_stores:Missing\) cannot be loaded"):
        open_stores("first:here,broken:there")
    assert [store.is_closed for store in opened] == [True]


@pytest.mark.parametrize("name", ["", " "])
def test_names_are_not_empty(name):
    with pytest.raises(ConfigError):
        register_store(name, lambda where, options: None)


def test_names_are_not_taken_twice():
    register_store("mine", lambda where, options: None)
    with pytest.raises(ConfigError, match="registered already"):
        register_store("mine", lambda where, options: None)


def test_what_is_no_store_is_refused():
    register_store("mine", lambda where, options: {})
    with pytest.raises(IntegrationError, match="is a dict"):
        open_stores("mine:here")


@pytest.mark.parametrize("where", ["//me:s3cret@host:1", "//:s3cret@host", "//me:s3cret@[::1"])
def test_a_password_that_mooncake_does_not_have_is_not_shown(where):
    with pytest.raises(ConfigError, match="write mooncake://HOST:PORT") as refused:
        open_stores(f"mooncake:{where}")
    assert "s3cret" not in str(refused.value)
