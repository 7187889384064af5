"""Block traces: what is read, and that replays count what a plain simulator counts."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict

import numpy as np
import pytest
from benchmarks.prefix.bench_policies import main
from benchmarks.prefix.block_traces import BlockRequest, BlockTrace, load_block_trace
from benchmarks.prefix.replay import replay, replay_optimum

from kvgraft.errors import ConfigError


def make_trace(num_requests=300, seed=0):
    """Conversations that grow turn by turn and share beginnings; a block id names its whole prefix."""
    rng = np.random.default_rng(seed)
    names, requests, chats = {}, [], []
    for _ in range(num_requests):
        if not chats or rng.random() < 0.2:
            chats.append([int(rng.integers(3))])
        chat = chats[int(rng.integers(max(0, len(chats) - 6), len(chats)))]
        chat += rng.integers(0, 4, int(rng.integers(1, 4))).tolist()
        ids = [names.setdefault(tuple(chat[: end + 1]), len(names)) for end in range(len(chat))]
        requests.append(BlockRequest(None, len(ids) * 16 - int(rng.integers(16)), np.array(ids)))
    return BlockTrace("made", 16, tuple(requests))


def plain_lru(trace, num_blocks):
    """A dict of blocks, touched from tail to head."""
    held, hits = OrderedDict(), 0
    for request in trace.requests:
        ids = request.block_ids.tolist()
        leading = next((i for i, block in enumerate(ids) if block not in held), len(ids))
        hits += min(leading * trace.block_size, request.num_tokens)
        for block in reversed(ids):
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("num_blocks", [30, 60, 120, 240])
def test_lru_counts_what_a_plain_simulator_counts(num_blocks):
    trace = make_trace()
    assert replay(trace, "lru", num_blocks * 16).hit_tokens == plain_lru(trace, num_blocks)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru"])
def test_no_policy_beats_the_optimum_and_all_reach_it_without_a_limit(policy):
    trace = make_trace()
    for capacity in (480, 960, 1920):
        assert replay(trace, policy, capacity).hit_tokens <= replay_optimum(trace, capacity).hit_tokens
    assert replay(trace, policy, None).hit_tokens == replay_optimum(trace, None).hit_tokens


def write(path, *records):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return str(path)


def test_both_formats_are_read(tmp_path):
    mooncake = load_block_trace(write(tmp_path / "m.jsonl.gz", {"input_length": 600, "hash_ids": [1, 2]}))
    assert (mooncake.block_size, mooncake.num_tokens, mooncake.name) == (512, 600, "m")
    nested = {"requests": [{"in": 70, "hash_ids": [5, 6]}]}
    claude = {"id": "a", "block_size": 64, "requests": [{"in": 64, "hash_ids": [5]}, nested]}
    trace = load_block_trace(write(tmp_path / "c.jsonl.gz", claude, {**claude, "id": "b"}))
    assert [(r.session, r.num_tokens) for r in trace.requests] == [("a", 64), ("a", 70), ("b", 64), ("b", 70)]
    assert replay(trace, "lru", None).hit_tokens == 128


@pytest.mark.parametrize("text", ["{", '{"hash_ids": [1]}\n', '{"input_length": 1, "hash_ids": ["x"]}\n', ""])
def test_a_file_that_is_no_trace_is_named(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        load_block_trace(str(path))


def test_the_command_prints_a_table_and_json(tmp_path, capsys):
    path = write(tmp_path / "t.jsonl.gz", *[{"input_length": 1024, "hash_ids": [1, 2]}] * 3)
    assert main([path, "--policy", "all", "--capacity", "1K,0.5M,0"]) == 0
    plot = tmp_path / "plot.png"
    table = capsys.readouterr().out
    assert "66.67%" in table
    assert "no limit" in table
    assert main([path, "--policy", "slru", "--policy-config", '{"protected_threshold": 1}', "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["hit_tokens"], result["capacity"], result["policy"]) == (2048, None, "slru")
    assert main([path, "--policy", "all", "--capacity", "1K,0", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "unknown eviction policy 'best'"),
        (["--policy", "all", "--policy-config", '{"threshold": 1}'], "goes with a single --policy"),
        (["--policy-config", "{"], "--policy-config is no JSON"),
        (["--policy-config", "[]"], "must be an object"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, arguments, message):
    path = write(tmp_path / "t.jsonl.gz", {"input_length": 1, "hash_ids": [1]})
    assert main([path, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_file_is_one_line(capsys):
    assert main(["nowhere.jsonl"]) == 2
    assert "nowhere.jsonl cannot be read" in capsys.readouterr().err


def test_json_that_is_nested_too_deep_is_one_line(tmp_path, capsys):
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000)
    assert main([str(path)]) == 2
    assert "deep.jsonl" in capsys.readouterr().err
    assert main(["--policy-config", "[" * 100_000, "x"]) == 2
    assert "--policy-config" in capsys.readouterr().err


def test_a_capacity_without_end_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--capacity", "inf", "x"])
    assert "no number of tokens" in capsys.readouterr().err
