"""Table T12: recorded calls are asked in order, and what each mode computes is summed up beside the bound."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from benchmarks.suite.__main__ import build_parser
from benchmarks.suite.page import panels_of
from benchmarks.suite.tables import recorded

from kvgraft.bench.recorded import bound_of, read_pack
from kvgraft.donors import set_process_secret
from kvgraft.errors import ConfigError

MODEL = ("--model", "graft-tiny", "--num-slots", "4000")


@pytest.fixture(autouse=True)
def _secret():
    yield
    set_process_secret(bytes(32))  # as tests/conftest.py sets it


def run(*argv):
    args = build_parser().parse_args(["recorded", *map(str, argv), *MODEL])
    return args.run(args)


def words(rng, count):
    return rng.integers(64, 40_000, count).tolist()


def write_pack(path, calls):
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for after, tokens in calls:
            lines.write(json.dumps({"client": path.name, "session": "S1", "after": after, "tokens": tokens}) + "\n")


@pytest.fixture
def packs(tmp_path):
    """Two clients that have notes in common: each asks twice, and then begins anew."""
    rng = np.random.default_rng(0)
    notes = words(rng, 400)
    for client in ("cline", "claude"):
        tools = words(rng, 300)
        first, second = tools + notes + words(rng, 50), words(rng, 60)
        again = words(rng, 20) + tools + notes + words(rng, 30)
        write_pack(tmp_path / f"{client}.jsonl.gz", [(0, first), (len(first), second), (0, again)])
    return tmp_path


def test_a_prompt_is_what_it_adds_to_the_one_before_it(tmp_path):
    write_pack(tmp_path / "a.jsonl.gz", [(0, [7, 8, 9]), (2, [5]), (3, [6, 6])])
    assert [prompt.tolist() for prompt in read_pack(tmp_path / "a.jsonl.gz")] == [[7, 8, 9], [7, 8, 5], [7, 8, 5, 6, 6]]
    assert len(read_pack(tmp_path / "a.jsonl.gz", 2)) == 2
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as lines:
        lines.write('{"after": 0}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz:1 is no call of an agent"):
        read_pack(tmp_path / "b.jsonl.gz")


def test_the_bound_counts_tokens_in_no_known_run_of_sixteen():
    rng = np.random.default_rng(1)
    text, new = (rng.integers(0, 9_999, 100) for _ in range(2))
    assert bound_of([], [text, text]) == 100
    assert bound_of([text], [np.concatenate([new[:10], text[30:46], new[10:20], text[:15]])]) == 35
    assert bound_of([], [text[:9]]) == 9


def test_clients_are_asked_alone_after_one_another_and_with_other_secrets(packs, capsys):
    assert run("--data", packs, "--secrets", 3, "--journal", packs / "journal", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["absent"] == ["codex", "continue", "aider"]
    rows = {(row["client"], row["before"]): row for row in found["rows"]}
    assert list(rows) == [("claude", "nothing"), ("cline", "nothing"), ("claude", "cline"), ("cline", "claude")]
    for (client, before), row in rows.items():
        assert (row["engine"], row["calls"], row["tokens"]) == ("kvgraft", 3, 750 + 810 + 750)
        assert row["exact_tokens"] == 750 + 60 + 750
        known = 400 if before != "nothing" else 0
        assert row["bound_tokens"] == 750 - known + 60 + 50
        assert row["bound_tokens"] <= row["graft_tokens"] < row["exact_tokens"]
        assert row["worst_lead_tokens"] <= 0
        assert row["secrets"] == (3 if (client, before) == ("cline", "claude") else 1)
    assert panels_of({"result": found})
    text = recorded.BLOCKS["clients"](found)
    assert "| kvgraft | cline | claude | 3 | 2,310 | 1,560 |" in text
    assert "| kvgraft | cline | claude | 3 | 0.0 % |" in recorded.BLOCKS["spread"](found)
    assert not recorded.BLOCKS["spread"]({"rows": [rows["claude", "cline"]]})


def test_what_is_missing_is_told_in_one_line(packs):
    with pytest.raises(ConfigError, match="no pack of codex is in"):
        run("--data", packs, "--names", "codex")
    with pytest.raises(ConfigError, match="there is no client 'emacs'; choose of claude, cline"):
        run("--data", packs, "--names", "emacs")
