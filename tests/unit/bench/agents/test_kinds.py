"""Agents do to their prompts what their kind says, the same for the same seed, and what they repeat is found."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from kvgraft.bench.agents import AGENT_KINDS, AgentSettings, agent_prompts
from kvgraft.bench.packs import load_pack
from kvgraft.bench.reuse import measure_reuse
from kvgraft.bench.tokenization import load_tokenizer
from kvgraft.bench.workloads import named_workloads
from kvgraft.cli import main
from kvgraft.errors import ConfigError

pytestmark = pytest.mark.slow

SETTINGS = AgentSettings(turns=24, files=3)
NO_PREFIX = {"clock": 0.01, "reorder": 0.35}
"""Largest share of tokens that an exact prefix may find."""


def texts(kind, settings=SETTINGS):
    return [prompt.text for prompt in agent_prompts(kind, settings)]


def body(text):
    """A prompt without the line that asks the model to speak."""
    return text.removesuffix("<|im_start|>assistant\n")


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_the_same_seed_makes_the_same_prompts(kind):
    assert texts(kind) == texts(kind)
    assert texts(kind) != texts(kind, AgentSettings(turns=24, files=3, seed=1))


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_what_is_known_at_any_offset_is_found(kind):
    (workload,) = named_workloads(f"agent:{kind}")
    found = measure_reuse(workload, load_tokenizer(None), min_run=32)
    assert found.wrong_tokens == 0
    assert found.bound_tokens > 0.85 * found.tokens
    assert found.recovered > 0.99
    assert found.prefix_tokens <= NO_PREFIX.get(kind, 1.0) * found.tokens
    assert len(found.prompts) == found.requests == 40
    assert sum(prompt.reused_tokens for prompt in found.prompts) == found.reused_tokens


def test_growing_prompts_only_grow():
    for before, after in pairwise(texts("growing")):
        assert after.startswith(body(before))


def test_a_clock_changes_the_first_line_alone():
    for before, after in pairwise(texts("clock")):
        first, rest = (text.split("\n", 2)[1:] for text in (before, after))
        assert first[0] != rest[0]
        assert rest[1].startswith(body(first[1]))


def test_compaction_makes_prompts_shorter_and_says_what_was_done():
    prompts = texts("compaction")
    shrunk = [after for before, after in pairwise(prompts) if len(after) < len(before)]
    assert len(shrunk) == 2
    assert all("Summary of what was done so far:\n- " in text for text in shrunk)


def test_reasoning_of_earlier_tasks_is_gone_and_that_of_this_one_is_not():
    prompts = texts("stripped")
    assert any("<think>" in text for text in prompts)
    for text in prompts:
        last_task = text.rindex("<|im_start|>user")
        assert "<think>" not in text[:last_task]
        assert text[last_task:].count("<think>") == text[last_task:].count("<tool_call>")


def test_tools_and_files_come_in_another_order():
    prompts = texts("reorder")
    names = [tuple(re.findall(r'<file name="([^"]+)">', text)) for text in prompts]
    assert len(set(names)) > 3
    assert len({tuple(sorted(each)) for each in names}) == 1


def test_subagents_share_files_behind_other_beginnings():
    prompts = texts("subagents")
    files = [text[text.index("# Files") : text.index("<|im_end|>")] for text in prompts]
    assert len(set(files)) == 1
    assert all(shared(before, after) < before.index("# Tools") for before, after in pairwise(prompts))
    assert prompts[4].startswith(prompts[0][: prompts[0].index("<|im_end|>")])


def test_an_edit_is_in_the_middle_of_a_file_and_the_conversation_goes_on():
    for before, after in pairwise(texts("edit")):
        where = shared(before, after)
        assert before.index("# Files") < where < before.index("<|im_end|>")
        history = body(before)[body(before).index("<|im_end|>") :]
        assert history in after


def test_a_switch_changes_the_system_prompt_and_nothing_behind_it():
    prompts = texts("switch")
    changes = [turn for turn, (a, b) in enumerate(pairwise(prompts), 1) if shared(a, b) < a.index("# Tools")]
    assert changes == [5, 10, 15, 20]
    for before, after in pairwise(prompts):
        assert body(before)[before.index("# Tools") :] in after


def test_sessions_take_turns_and_end_where_they_are_too_long():
    settings = AgentSettings(turns=12, sessions=3, files=2)
    prompts = agent_prompts("edit", settings)
    assert [(prompt.session, prompt.turn) for prompt in prompts[:6]] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    short = agent_prompts("edit", AgentSettings(turns=12, files=2, max_characters=7_000))
    assert 2 <= len(short) < 12
    assert max(len(prompt.text) for prompt in short) <= 7_000
    with pytest.raises(ConfigError, match="raise --max-characters"):
        agent_prompts("edit", AgentSettings(max_characters=1_000))


def test_every_call_of_a_tool_is_answered():
    text = texts("growing")[-1]
    said = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL)
    for (role, content), (next_role, _) in pairwise(said):
        assert next_role == ("tool" if "<tool_call>" in content and role == "assistant" else next_role)
        assert role != "assistant" or "<tool_call>" in content or next_role == "user"
    assert {role for role, _ in said} == {"system", "user", "assistant", "tool"}
    assert "passed" in text


def test_more_turns_leave_those_in_front_as_they_are():
    for kind in ("reorder", "clock"):
        assert texts(kind, AgentSettings(turns=20, seed=4))[:6] == texts(kind, AgentSettings(turns=6, seed=4))


def test_more_than_there_is_text_for_is_refused():
    with pytest.raises(ConfigError, match="make fewer"):
        agent_prompts("growing", AgentSettings(turns=100_000))


@pytest.mark.parametrize("wrong", [{"turns": 1}, {"sessions": 0}, {"files": 0}, {"max_characters": 10}])
def test_numbers_that_make_no_session_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AgentSettings(**wrong)


def test_packs_are_written_and_read(tmp_path, capsys):
    assert main(["bench", "pack", "agent", "clock", "edit", "--turns", "4", "--output", str(tmp_path)]) == 0
    (workload,) = load_pack(str(tmp_path / "agent_clock"))
    assert workload.sessions[0].requests == tuple(texts("clock", AgentSettings(turns=4)))
    assert "agent_edit.jsonl: 4 prompts" in capsys.readouterr().err


def test_counts_are_told_turn_by_turn(capsys):
    assert main(["bench", "pack", "agent", "clock", "--turns", "3"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in lines] == [["clock", str(turn)] for turn in range(3)]
    assert all(int(line[3]) == 0 for line in lines)
    assert all(int(line[4]) == int(line[5]) > 500 for line in lines[1:])


def test_counts_are_drawn(capsys, tmp_path):
    plot, folder = tmp_path / "plot.png", tmp_path / "packs"
    options = ["--turns", "30", "--plot", str(plot), "--output", str(folder)]
    assert main(["bench", "pack", "agent", "clock", "edit", *options]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (folder / "agent_edit.jsonl").is_file()
    assert len(capsys.readouterr().out.splitlines()) == 61
    assert main(["bench", "pack", "agent", "clock", "--plot", str(tmp_path / "absent" / "plot.png")]) == 2
    assert "--plot" in capsys.readouterr().err


def test_unknown_kinds_and_folders_are_named(capsys, tmp_path):
    assert main(["bench", "pack", "agent", "clok"]) == 2
    assert "choose growing, clock" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["bench", "pack", "agent", "clock", "--turns", "2", "--output", str(tmp_path / "file")]) == 2
    assert "give another folder for --output" in capsys.readouterr().err
