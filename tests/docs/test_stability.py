"""docs/stability.md names versions, packages and entry points that the code has, and a release has one version."""

from __future__ import annotations

import importlib
import re
import tomllib

from tests.docs.code_index import ROOT

import kvgraft
from kvgraft.fidelity.control.calibration import CALIBRATION_VERSION
from kvgraft.fidelity.control.state_file import STATE_VERSION
from kvgraft.memory.store.record import FORMAT_VERSION

PAGE = (ROOT / "docs" / "stability.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_versions_of_files_are_those_that_are_written():
    told = [int(row[1]) for row in ROWS if row[1].isdecimal()]
    assert told == [FORMAT_VERSION, CALIBRATION_VERSION, STATE_VERSION]


def test_packages_have_public_names():
    (stable,) = [row[1] for row in ROWS if row[0].startswith("[Python]")]
    packages, points = stable.partition("public methods")[0], stable.partition("entry points")[2]
    names = re.findall(r"`(kvgraft[\w.]*)`", packages)
    assert names
    assert not [name for name in names if not importlib.import_module(name).__all__]
    loaders = "".join(path.read_text() for path in (ROOT / "src" / "kvgraft").rglob("*.py"))
    assert not [name for name in re.findall(r"`(kvgraft\.\w+)`", points) if f'"{name}"' not in loaders]


def test_the_version_is_one():
    assert kvgraft.__version__ == PROJECT["version"]
    pushed = re.findall(r"REGISTRY/[\w-]+:(\S+)", (ROOT / "docs" / "kubernetes.md").read_text())
    assert set(pushed) == {PROJECT["version"]}
