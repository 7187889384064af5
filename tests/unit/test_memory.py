"""How much memory may still be taken, as the kernel tells it."""

from __future__ import annotations

import pytest

from kvgraft.config import available_memory, physical_memory

MIB = 1 << 20


@pytest.fixture
def kernel(tmp_path):
    """Writes files of a made-up kernel; gives what follows from them."""

    def told(files):
        for name, text in ({"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    8192 kB\n"} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return available_memory(tmp_path / "proc", tmp_path / "groups")

    return told


def test_without_groups_it_is_what_the_machine_has(kernel):
    assert kernel({}) == 8 * MIB
    assert 0 < available_memory() <= physical_memory()


def test_where_nothing_is_told_it_is_all_of_the_machine(tmp_path):
    assert available_memory(tmp_path, tmp_path) == physical_memory()


@pytest.mark.parametrize("folder", ["groups/app", "groups"])
def test_a_group_of_version_2_bounds_it_wherever_it_is_mounted(kernel, folder):
    files = {
        "proc/self/cgroup": "0::/app\n",
        f"{folder}/memory.max": f"{6 * MIB}\n",
        f"{folder}/memory.current": f"{5 * MIB}\n",
        f"{folder}/memory.stat": f"anon 7\ninactive_file {MIB}\nactive_file {MIB}\n",
    }
    assert kernel(files) == 3 * MIB


def test_a_group_of_version_1_bounds_it_and_so_do_those_above(kernel):
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/outer/inner\n0::/\n"}
    for name, limit in (("outer/inner", 7 * MIB), ("outer", 4 * MIB)):
        files[f"groups/memory/{name}/memory.limit_in_bytes"] = str(limit)
        files[f"groups/memory/{name}/memory.usage_in_bytes"] = str(MIB)
    assert kernel(files) == 3 * MIB


def test_a_group_without_a_limit_bounds_nothing(kernel):
    files = {"proc/self/cgroup": "0::/a\n", "groups/a/memory.max": "max\n", "groups/a/memory.current": "1\n"}
    assert kernel(files) == 8 * MIB
