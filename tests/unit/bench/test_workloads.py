from __future__ import annotations

import pytest

from kvgraft.bench.workloads import named_workloads
from kvgraft.cli import main
from kvgraft.errors import ConfigError


@pytest.mark.parametrize(("name", "count"), [("builtin", 192), ("builtin:rag", 50)])
def test_builtin_workloads_are_made_and_always_the_same(name, count):
    (workload,) = named_workloads(name)
    assert (workload.name, workload.num_prompts) == (name, count)
    assert named_workloads(name)[0].sessions == workload.sessions


def test_other_names_are_packs(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"input": "a"}\n')
    assert named_workloads(str(tmp_path / "mine"))[0].sessions[0].requests == ("a",)
    with pytest.raises(ConfigError, match="no request pack"):
        named_workloads(str(tmp_path / "builtins"))


def test_bench_reuse_needs_no_file(capsys):
    assert main(["bench", "reuse", "builtin"]) == 0
    assert "builtin" in capsys.readouterr().out
