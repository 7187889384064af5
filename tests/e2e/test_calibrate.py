"""`kvgraft calibrate` on a tiny model: its losses are the model's own, and it claims no more than it has seen."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvgraft.bench.calibrate import (
    AskedRisk,
    Prompts,
    Reference,
    calibration_of,
    references,
    sample_notch,
    sample_notches,
    summed_up,
    tokenized,
)
from kvgraft.bench.chat import user_message
from kvgraft.bench.packs import PackSession
from kvgraft.bench.prompts import read_sessions
from kvgraft.cli import main
from kvgraft.engine import LLM
from kvgraft.errors import ConfigError
from kvgraft.fidelity.control import AnswerPart, Loss, load_calibration
from kvgraft.fidelity.control.notches import notches_of
from kvgraft.types import RepairTime

pytestmark = [pytest.mark.usefixtures("looks_are_free"), pytest.mark.slow]

PASSAGE = "def area(width, height):\n    return width * height\n\n\ndef volume(w, h, d):\n    return d * area(w, h)\n"


@pytest.fixture
def prompts(tmp_path):
    """Twelve prompts over one passage, and one that shares nothing."""
    lines = [{"prompt": f"Question {number}, asked by {number * 7919}:\n{PASSAGE}"} for number in range(12)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"prompt": "Nothing of this was read before."}]))
    return str(path)


def run(capsys, *argv):
    code = main([*argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


PARTS = {
    RepairTime.BEFORE: {AnswerPart.WHOLE},
    RepairTime.AFTER: {AnswerPart.FIRST, AnswerPart.LATER, AnswerPart.WHOLE},
}
"""Rows of a notch at which requests may be repaired as late as this."""


@pytest.mark.parametrize("repair", ["before", "after"])
def test_only_grafted_requests_count_and_each_notch_serves_all(model_dir, prompts, repair):
    llm = LLM(model_dir, num_slots=2_000, selection="query_seam", repair=repair, repair_below_margin=0)
    loss = Loss.parse("greedy:4")
    tokens = tokenized(llm, read_sessions(prompts), loss.num_tokens)
    steps = []
    expected = references(llm, tokens, loss, lambda: steps.append(0))
    notches = notches_of(llm.policy, RepairTime(repair))
    samples = {
        notch.name: sample_notch(llm, notch, tokens, expected, loss, advance=lambda: steps.append(0))
        for notch in notches
    }
    assert len(steps) == tokens.count * (1 + len(notches))
    assert samples["full"].losses == {AnswerPart.WHOLE: [0.0] * 13}
    for notch in notches[1:]:
        losses = samples[notch.name].losses
        assert set(losses) == PARTS[notch.repair]
        assert {part: len(lost) for part, lost in losses.items()} == dict.fromkeys(losses, 11)
    firsts = [sample.losses[AnswerPart.FIRST] for sample in samples.values() if AnswerPart.FIRST in sample.losses]
    assert firsts == firsts[:1] * len(firsts), "what is computed after it cannot matter to the first token"
    wholes = {name: sample.losses[AnswerPart.WHOLE] for name, sample in samples.items()}
    if repair == "after":
        assert wholes.pop("50 % before") == wholes["50 %"]
        samples.pop("50 % before")
    shares = [sample.recomputed / sample.reused for name, sample in samples.items() if name != "full"]
    reused = samples["none"].reused // 11
    assert shares == pytest.approx(
        [math.ceil(share * reused) / reused for share in (0.5, 0.25, 0.1, 0.05, 0.0)], abs=0.01
    )
    assert sum(wholes["none"]) > 0
    assert llm.usage().free == llm.usage().total


def test_kl_is_measured_where_tokens_agree(model_dir, prompts):
    llm = LLM(model_dir, num_slots=2_000, selection="none")
    loss = Loss.parse("kl:1e-6")
    tokens = tokenized(llm, read_sessions(prompts, 3), loss.num_tokens)
    expected = references(llm, tokens, loss, lambda: None)
    full, none = (
        sample_notch(llm, notch, tokens, expected, loss, advance=lambda: None)
        for notch in notches_of(llm.policy, RepairTime.AFTER)
    )
    assert sum(full.losses[AnswerPart.WHOLE]) < 0.1
    assert all(sum(none.losses[part]) > 0.5 for part in AnswerPart)
    assert none.losses[AnswerPart.FIRST] == pytest.approx(none.losses[AnswerPart.WHOLE], rel=1e-3)


def test_a_first_token_that_is_unsure_enough_to_wait_is_the_one_that_waited(model_dir, prompts):
    """With a margin of 1 all wait."""
    loss, found = Loss.parse("kl:1"), {}
    for margin in (0.0, 1.0):
        llm = LLM(model_dir, num_slots=2_000, selection="query_seam", repair_below_margin=margin)
        tokens = tokenized(llm, read_sessions(prompts, 4), loss.num_tokens)
        notch = next(notch for notch in notches_of(llm.policy, RepairTime.AFTER) if notch.name == "50 %")
        expected = references(llm, tokens, loss, lambda: None)
        found[margin] = sample_notch(llm, notch, tokens, expected, loss, advance=lambda: None).losses
    assert found[0.0][AnswerPart.FIRST] != found[0.0][AnswerPart.WHOLE] == found[1.0][AnswerPart.WHOLE]
    assert found[1.0][AnswerPart.FIRST] == found[1.0][AnswerPart.WHOLE]


def test_what_scores_do_not_repair_is_not_calibrated(model_dir, prompts):
    llm = LLM(model_dir, num_slots=2_000, repair_rows=4)
    tokens = tokenized(llm, read_sessions(prompts, 2), 4)
    with pytest.raises(ConfigError, match=r"repair_rows goes on to repair.*; use first_token"):
        references(llm, tokens, Loss.parse("greedy:4"), lambda: None)
    assert len(references(llm, tokens, Loss.parse("first_token"), lambda: None)) == 2


def test_requests_of_which_all_that_is_copied_is_exact_do_not_count(model_dir, rng):
    """They bear no risk, and none is stated of them: beside those that do they would hide it."""
    llm = LLM(model_dir, num_slots=600, selection="none", heal="off")
    document, *others = (rng.integers(3, 200, 200) for _ in range(9))
    asked = np.concatenate([document, rng.integers(3, 200, 20)]), np.concatenate([rng.integers(3, 200, 30), document])
    prompts = Prompts((((document, *others), asked),), 0)  # the others take the document's prefix from the device
    loss, none = Loss.parse("kl:1e-9"), notches_of(llm.policy, RepairTime.BEFORE)[-1]
    expected = references(llm, prompts, loss, lambda: None)
    sample = sample_notch(llm, none, prompts, expected, loss, advance=lambda: None)
    assert [len(lost) for lost in sample.losses.values()] == [1]


def test_a_part_that_no_answer_had_is_not_certified(model_dir, prompts):
    """Answers that all end with their first token say nothing about the tokens after one that does not."""
    llm = LLM(model_dir, num_slots=2_000, selection="none", repair="after")
    loss = Loss.parse("first_token")
    tokens = tokenized(llm, read_sessions(prompts), 1)
    expected = [
        Reference(full.token_ids[:1], full.evidence[:1]) for full in references(llm, tokens, loss, lambda: None)
    ]
    asked = AskedRisk(loss, 0.95, 0.2)
    samples = sample_notches(llm, tokens, expected, asked, takes_all=False, advance=lambda: None)
    (none,) = summed_up(samples, asked)
    assert {result.part: (result.requests, result.p_value <= 0.2) for result in none.parts} == {
        AnswerPart.FIRST: (11, True),
        AnswerPart.LATER: (0, False),
        AnswerPart.WHOLE: (11, True),
    }
    assert (none.worst.part, none.worst.p_value, none.is_certified) == (AnswerPart.LATER, 1.0, False)


def test_sessions_begin_with_an_empty_cache(model_dir):
    llm = LLM(model_dir, num_slots=2_000, selection="none")
    loss = Loss.parse("first_token")
    sessions = [PackSession((), (f"One. {PASSAGE}",)), PackSession((f"Two. {PASSAGE}",), (f"Number three. {PASSAGE}",))]
    tokens = tokenized(llm, sessions, 1)
    expected = references(llm, tokens, loss, lambda: None)
    none = notches_of(llm.policy, RepairTime.AFTER)[-1]
    sample = sample_notch(llm, none, tokens, expected, loss, advance=lambda: None)
    assert [len(lost) for lost in sample.losses.values()] == [1] * 3


def test_too_few_prompts_certify_nothing_and_say_how_many_it_takes(capsys, model_dir, prompts, tmp_path):
    output = tmp_path / "calibration.json"
    code, out, _ = run(
        capsys, "calibrate", "--model", model_dir, "--prompts", prompts, "--output", str(output), "--plot"
    )
    assert code == 1
    assert "nothing is certified: 11 requests were grafted, and with none lost it takes 149; give more prompts" in out
    assert not output.exists()


def test_what_is_certified_is_written_and_served(capsys, model_dir, prompts, tmp_path):
    output, plot = tmp_path / "calibration.json", tmp_path / "calibration.png"
    options = ("--epsilon", "0.95", "--delta", "0.2", "--output", str(output), "--plot", str(plot))
    code, out, _ = run(capsys, "calibrate", "--model", model_dir, "--prompts", prompts, *options)
    assert code == 0
    assert out.count("certified\n") == 6
    assert all(" whole " in line for line in out.splitlines() if line.endswith("  certified"))
    assert "first_token at most 0.95 at notch 'none'" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert load_calibration(output).notch == "none"
    llm = LLM(model_dir, num_slots=2_000, calibration=str(output))
    assert llm.policy.name == "none"
    assert (llm.risk.start.notch, llm.risk.start.part) == ("none", "first")
    with pytest.raises(ConfigError, match=r"is of another repair \(after, here before\)"):
        LLM(model_dir, num_slots=2_000, calibration=str(output), repair="before")
    with pytest.raises(ConfigError, match="is of another min_run"):
        LLM(model_dir, num_slots=2_000, calibration=str(output), min_run=32)


def test_json_says_the_same(capsys, model_dir, prompts):
    options = ("calibrate", "--model", model_dir, "--prompts", prompts, "--limit", "4", "--json")
    code, out, _ = run(capsys, *options, "--all-notches")
    result = json.loads(out)
    assert (code, result["notch"], result["prompts"]) == (1, "full", 4)
    assert [[(part["part"], part["requests"]) for part in row["parts"]] for row in result["results"]] == [
        [("whole", 3)],
        *[[("first", 3), ("later", 3), ("whole", 3)]] * 5,
    ]
    assert result["full_prefill"] == {"requests": 4, "loss_sum": 0.0}
    assert [len(result["losses"][name]["whole"]) for name in ("full", "50 %", "none")] == [4, 3, 3]
    for row in result["results"]:
        for part in row["parts"]:
            assert sum(result["losses"][row["notch"]][part["part"]]) == part["loss_sum"]


def test_notches_after_the_first_that_fails_are_measured_if_asked(capsys, model_dir, prompts):
    options = ("calibrate", "--model", model_dir, "--prompts", prompts, "--limit", "4", "--json")
    quick, every = (json.loads(run(capsys, *options, *more)[1]) for more in ((), ("--all-notches",)))
    assert [row["notch"] for row in quick["results"]] == ["50 % before"]
    assert len(every["results"]) == 6
    assert quick["results"] == every["results"][:1]
    assert set(quick["losses"]) == {"full", "50 % before"}
    same = ("binding", "notch", "notches", "full_prefill")
    assert [quick[name] for name in same] == [every[name] for name in same]


def test_prompts_of_a_chat_need_a_template(capsys, model_dir, prompts):
    code, _, err = run(capsys, "calibrate", "--model", model_dir, "--prompts", prompts, "--chat")
    assert code == 2
    assert "has no chat template; give its prompts as they are" in err


def test_prompts_of_a_chat_are_what_the_template_makes_of_them():
    llm = LLM("graft-tiny", num_slots=600)
    llm.loaded.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    made = tokenized(llm, [PackSession((), ("word",))], 1, lambda text: user_message(llm, text))
    ((_, (prompt,)),) = made.sessions
    assert llm.loaded.tokenizer.decode(prompt) == "<user>word<assistant>"


class TestSummary:
    def results(self, losses, count=300):
        from kvgraft.bench.calibrate import NotchSample

        samples = {"full": NotchSample({AnswerPart.WHOLE: [0.0] * count})}
        for name, lost in losses.items():
            parts = lost if isinstance(lost, dict) else {AnswerPart.WHOLE: lost}
            samples[name] = NotchSample(
                {part: [1.0] * number + [0.0] * (count - number) for part, number in parts.items()}
            )
        return summed_up(samples, AskedRisk(Loss.parse("first_token"), 0.02, 0.05))

    def test_certifies_up_to_the_first_failure(self):
        results = self.results({"50 %": 0, "25 %": 1, "10 %": 6, "none": 0})
        assert [result.is_certified for result in results] == [True, True, False, False]

    def test_a_notch_is_as_good_as_its_worst_part(self):
        parts = dict.fromkeys(AnswerPart, 0)
        for part in AnswerPart:
            results = self.results({"50 %": parts, "25 %": parts | {part: 6}, "10 %": parts})
            assert [result.is_certified for result in results] == [True, False, False]
            assert results[1].worst.part is part

    def test_nothing_where_the_most_conservative_one_fails(self, model_dir):
        results = self.results({"50 %": 9, "none": 0})
        assert not any(result.is_certified for result in results)
        llm = LLM(model_dir, num_slots=2_000, repair="before")
        assert calibration_of(llm, results, AskedRisk(Loss.parse("first_token"), 0.02, 0.05), 300).notch == "full"


class TestPrompts:
    @pytest.mark.parametrize(
        "lines",
        [
            ['{"prompt": "a"}', "", '{"prompt": "b", "id": 3}'],
            ['{"text": "a"}', '{"text": "b"}'],
            ["a", "b"],
            ['{"input": "a"}', '{"input": "b"}'],
        ],
    )
    def test_forms(self, tmp_path, lines):
        path = tmp_path / "file.jsonl"
        path.write_text("\n".join(lines))
        assert [session.requests for session in read_sessions(str(path))] == [("a", "b")]
        assert [session.requests for session in read_sessions(str(path), 1)] == [("a",)]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "is empty"),
            ('{"prompt": "a"}\n{"text": "b"}', 'prompt 2 has no "prompt"'),
            ('{"other": 1}', '"input" is missing'),
        ],
    )
    def test_what_is_refused(self, tmp_path, text, words):
        path = tmp_path / "file.jsonl"
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_sessions(str(path))

    def test_builtin_needs_no_file(self):
        (session,) = read_sessions("builtin", 5)
        assert len(set(session.requests)) == 5

    def test_a_file_that_is_not_there(self):
        with pytest.raises(ConfigError, match="no request pack"):
            read_sessions("nowhere")

    def test_prompts_that_do_not_fit_are_left_out(self, model_dir):
        llm = LLM(model_dir, num_slots=600)
        assert tokenized(llm, [PackSession((), ("short", PASSAGE * 40))], 1).num_too_long == 1
        with pytest.raises(ConfigError, match="no prompt has at most"):
            tokenized(llm, [PackSession((), (PASSAGE * 40,))], 1)


def test_arguments_are_checked_before_anything_is_loaded(capsys, prompts):
    for options, words in (
        (("--epsilon", "0"), "--epsilon must lie between 0 and 1"),
        (("--delta", "1"), "--delta must lie"),
        (("--loss", "top1"), "unknown loss 'top1'"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--output", "/nowhere/at/all.json"), "the folder does not exist"),
    ):
        code, out, err = run(capsys, "calibrate", "--model", "nowhere", "--prompts", prompts, *options)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


def test_notches_are_ordered_by_what_they_compute_again(model_dir):
    for selection in ("query_seam", "first_k", "none"):
        llm = LLM(model_dir, num_slots=600, selection=selection)
        policies = [notch.policy for notch in notches_of(llm.policy, RepairTime.BEFORE)]
        assert policies[0] is None
        ratios = [policy.recompute_ratio for policy in policies[1:]]
        assert ratios == sorted(ratios, reverse=True)
        assert np.unique(ratios).size == len(ratios)
