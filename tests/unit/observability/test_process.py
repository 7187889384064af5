from __future__ import annotations

import platform
from importlib import metadata

import pytest

from kvgraft import __version__
from kvgraft.config import physical_memory
from kvgraft.observability.process import build_info, process_memory


@pytest.fixture
def root(tmp_path):
    """A root with a process of 3 pages and no cgroup."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("100 3 1 1 0 1 0\n")
    return tmp_path


def write(root, path, text):
    file = root / "sys/fs/cgroup" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_this_process_has_memory_and_a_limit():
    memory = process_memory()
    assert 0 < memory.resident_bytes < memory.limit_bytes <= physical_memory()


def test_without_a_cgroup_the_machine_is_the_limit(root):
    memory = process_memory(root)
    assert memory.limited_by == "machine"
    assert memory.limit_bytes == physical_memory()
    assert memory.resident_bytes % 3 == 0


def test_the_least_limit_of_a_cgroup_and_those_around_it_holds(root):
    (root / "proc/self/cgroup").write_text("0::/system.slice/kvgraft.service\n")
    write(root, "system.slice/kvgraft.service/memory.max", "max\n")
    write(root, "system.slice/memory.max", str(1 << 20))
    write(root, "memory.max", str(1 << 21))
    assert process_memory(root).limit_bytes == 1 << 20
    assert process_memory(root).limited_by == "cgroup"


def test_a_container_that_does_not_see_its_own_path_finds_its_limit(root):
    (root / "proc/self/cgroup").write_text("0::/docker/0123\n")
    write(root, "memory.max", str(1 << 22))
    assert process_memory(root).limit_bytes == 1 << 22


def test_cgroups_of_the_first_version(root):
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/job\n")
    write(root, "memory/job/memory.limit_in_bytes", str(1 << 23))
    assert process_memory(root).limit_bytes == 1 << 23


def test_a_limit_beyond_the_machine_is_none(root):
    (root / "proc/self/cgroup").write_text("4:memory:/\n")
    write(root, "memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    assert process_memory(root).limited_by == "machine"


def test_a_system_without_proc_says_nothing_of_the_process(tmp_path):
    assert process_memory(tmp_path).resident_bytes is None


def test_build_info_names_versions_and_leaves_empty_what_is_missing(monkeypatch):
    found = build_info()
    assert (found["version"], found["python"]) == (__version__, platform.python_version())
    assert found["torch"]

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("kvgraft.observability.process.metadata.version", missing)
    assert build_info()["torch"] == ""
