"""Where states are recorded, replayed: the counts are those of a list of prompts and states, and the command prints them."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
from benchmarks.prefix.state_recording import Room, main, record, record_everything

from kvgraft.prefix import BranchingPoints, EndOfPrompt, EveryTokens


def make_prompts(num_prompts=120, seed=0):
    """Conversations that grow turn by turn behind one of two system prompts."""
    rng = np.random.default_rng(seed)
    chats, prompts = [], []
    for _ in range(num_prompts):
        if not chats or rng.random() < 0.2:
            chats.append([int(rng.integers(2))] * 40)
        chat = chats[int(rng.integers(max(0, len(chats) - 4), len(chats)))]
        chat += rng.integers(0, 9, int(rng.integers(1, 30))).tolist()
        prompts.append(np.array(chat))
    return prompts


def plain_end_of_prompt(prompts, num_states, chunk):
    """A dict of whole beginnings, the least recently used first."""
    held, hits = OrderedDict(), 0
    for prompt in map(tuple, map(np.ndarray.tolist, prompts)):
        found = max((end for end in range(len(prompt)) if prompt[:end] in held), default=0)
        hits += found
        if found:
            held.move_to_end(prompt[:found])
        end = (len(prompt) - 1) // chunk * chunk
        if end > found:
            held[prompt[:end]] = None
            held.move_to_end(prompt[:end])
        while len(held) > num_states:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("num_states", [1, 4, 1000])
def test_it_counts_what_a_list_of_beginnings_counts(num_states, chunk):
    prompts = make_prompts()
    result = record("made", prompts, "end", EndOfPrompt(), Room(num_states, 1, chunk))
    assert result.hit_tokens == plain_end_of_prompt(prompts, num_states, chunk)
    assert result.num_tokens == sum(map(len, prompts))


def test_nothing_finds_more_than_a_state_at_every_token():
    prompts = make_prompts()
    everything = record_everything("made", prompts)
    for policy in (EndOfPrompt(), BranchingPoints(), EveryTokens(8)):
        assert record("made", prompts, "one", policy, Room(1000, 1, 1)).hit_tokens < everything.hit_tokens
    dense = record("made", prompts, "every 1", EveryTokens(1), Room(10**6, 1, 1))
    held, hits = set(), 0
    for prompt in map(tuple, map(np.ndarray.tolist, prompts)):
        beginnings = [prompt[:end] for end in range(1, len(prompt))]
        hits += max((len(beginning) for beginning in beginnings if beginning in held), default=0)
        held.update(beginnings)
    assert (dense.hit_tokens, dense.num_recorded) == (hits, len(held))


def test_branching_points_find_a_system_prompt():
    prompts = [np.array([7] * 50 + [number] * 10) for number in range(20)]
    results = [record("made", prompts, "", policy, Room(9, 1, 1)) for policy in (EndOfPrompt(), BranchingPoints())]
    assert [result.hit_tokens for result in results] == [0, 18 * 50]


def test_the_command(tmp_path, capsys):
    pack = tmp_path / "chats.jsonl"
    texts = ["a b c d", "a b c d e f", "a b c d e f g h"]
    pack.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    arguments = [str(pack), "--states", "2", "--chunks", "1", "--intervals", "2"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["everything", "end", "branching", "every 2"]
    assert rows[0]["hit_tokens"] > rows[1]["hit_tokens"] > 0
    assert rows[1]["room"] == {"num_states": 2, "state_bytes": 2**20, "chunk_size": 1}
    assert main(arguments) == 0
    assert "of all" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(pack), "--states", "0"])
    assert "every number must be at least 1" in capsys.readouterr().err
