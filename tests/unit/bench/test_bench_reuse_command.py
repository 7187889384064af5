"""`kvgraft bench reuse` from its arguments to what it prints."""

from __future__ import annotations

import argparse
import builtins
import json
import sys

import pytest

from kvgraft.cli import bench_reuse
from kvgraft.errors import ConfigError


def run(*argv):
    parser = argparse.ArgumentParser()
    bench_reuse.register(parser.add_subparsers())
    args = parser.parse_args(["reuse", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def pack(tmp_path):
    document = " ".join(f"word{i} and" for i in range(100))
    lines = [{"input": f"Question {i}: {document}"} for i in "ab"] + [{"input": "short"}]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_is_an_array_with_an_object_per_workload(pack, capsys):
    assert run(pack, pack, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["workload"] == second["workload"] == "docs"
    assert first["requests"] == 3
    assert first["wrong_tokens"] == 0
    assert first["reused_tokens"] == first["bound_tokens"] > 100
    assert first["recovered"] == 1.0


def test_table_has_a_line_per_workload(pack, capsys):
    assert run(pack) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["workload", "requests", "tokens"]
    assert line.split()[:2] == ["docs", "3"]


def test_the_table_is_drawn(pack, tmp_path):
    plot = tmp_path / "plot.png"
    assert run(pack, "--plot", plot) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_is_measured(pack, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="create it first"):
        run(pack, "--plot", tmp_path / "absent" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for name in ("drawing", "figure"):
        monkeypatch.delitem(sys.modules, f"kvgraft.bench.{name}", raising=False)
    with pytest.raises(ImportError, match=r"kvgraft\[bench\]"):
        run(pack, "--plot", tmp_path / "plot.png")


@pytest.mark.parametrize("options", [("--min-run", 8), ("--capacity", 3)])
def test_sizes_below_a_gram_are_refused(pack, options):
    with pytest.raises(ConfigError, match=f"{options[0]} must be at least 16"):
        run(pack, *options)


def test_missing_pack_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no request pack"):
        run(tmp_path / "nothing")


def test_missing_tokenizers_package_names_the_extra(pack, monkeypatch):
    real_import = builtins.__import__

    def without_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(ImportError, match=r"kvgraft\[torch\]"):
        run(pack, "--tokenizer", pack)


def test_wrong_tokens_fail_the_command(pack, monkeypatch, capsys):
    monkeypatch.setattr("kvgraft.bench.reuse._Replay._num_wrong", lambda *_: 1)
    assert run(pack, "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["wrong_tokens"] == 1
