"""`kvgraft calibrate` on a tiny model: its losses are the model's own, and it claims no more than it has seen."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvgraft.bench.calibrate import Asked, calibration_of, references, sample_notch, summed_up, tokenized
from kvgraft.bench.chat import user_message
from kvgraft.bench.packs import Session
from kvgraft.bench.prompts import read_sessions
from kvgraft.cli import main
from kvgraft.engine import LLM
from kvgraft.errors import ConfigError
from kvgraft.fidelity.control import Loss, load_calibration
from kvgraft.reuse.notches import notches_of

pytestmark = pytest.mark.usefixtures("looks_are_free")

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


def test_only_grafted_requests_count_and_each_notch_serves_all(model_dir, prompts):
    llm = LLM(model_dir, num_slots=2_000, selection="query_seam")
    loss = Loss.parse("greedy:4")
    tokens = tokenized(llm, read_sessions(prompts), loss.num_tokens)
    steps = []
    expected = references(llm, tokens, loss, lambda: steps.append(0))
    samples = {
        notch.name: sample_notch(llm, notch, tokens, expected, loss, advance=lambda: steps.append(0))
        for notch in notches_of(llm.policy)
    }
    assert len(steps) == tokens.count * 7
    assert samples["full"].grafted == [0.0] * 13
    assert [len(sample.grafted) for sample in samples.values()][1:] == [11] * 5
    shares = [sample.recomputed / sample.reused for name, sample in samples.items() if name != "full"]
    reused = samples["none"].reused // 11
    assert shares == pytest.approx(
        [math.ceil(share * reused) / reused for share in (0.5, 0.25, 0.1, 0.05, 0.0)], abs=0.01
    )
    assert sum(samples["none"].grafted) > 0
    assert llm.usage().free == llm.usage().total


def test_kl_is_measured_where_tokens_agree(model_dir, prompts):
    llm = LLM(model_dir, num_slots=2_000, selection="none")
    loss = Loss.parse("kl:1e-6")
    tokens = tokenized(llm, read_sessions(prompts, 3), loss.num_tokens)
    expected = references(llm, tokens, loss, lambda: None)
    full, none = (sample_notch(llm, n, tokens, expected, loss, advance=lambda: None) for n in notches_of(llm.policy))
    assert sum(full.grafted) < 0.1
    assert sum(none.grafted) > 0.5


def test_sessions_begin_with_an_empty_cache(model_dir):
    llm = LLM(model_dir, num_slots=2_000, selection="none")
    loss = Loss.parse("first_token")
    sessions = [Session((), (f"One. {PASSAGE}",)), Session((f"Two. {PASSAGE}",), (f"Number three. {PASSAGE}",))]
    tokens = tokenized(llm, sessions, 1)
    expected = references(llm, tokens, loss, lambda: None)
    sample = sample_notch(llm, notches_of(llm.policy)[-1], tokens, expected, loss, advance=lambda: None)
    assert len(sample.grafted) == 1


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
    assert out.count("certified\n") == 5
    assert "first_token at most 0.95 at notch 'none'" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert load_calibration(output).notch == "none"
    llm = LLM(model_dir, num_slots=2_000, calibration=str(output))
    assert llm.policy.name == "none"
    assert llm.risk.start.notch == "none"
    with pytest.raises(ConfigError, match="is of another min_run"):
        LLM(model_dir, num_slots=2_000, calibration=str(output), min_run=32)


def test_json_says_the_same(capsys, model_dir, prompts):
    code, out, _ = run(capsys, "calibrate", "--model", model_dir, "--prompts", prompts, "--limit", "4", "--json")
    result = json.loads(out)
    assert (code, result["notch"], result["prompts"]) == (1, "full", 4)
    assert [row["requests"] for row in result["results"]] == [3] * 5
    assert result["full_prefill"] == {"requests": 4, "loss_sum": 0.0}
    assert [len(result["losses"][name]) for name in ("full", "50 %", "none")] == [4, 3, 3]
    assert [sum(result["losses"][row["notch"]]) for row in result["results"]] == [
        row["loss_sum"] for row in result["results"]
    ]


def test_prompts_of_a_chat_need_a_template(capsys, model_dir, prompts):
    code, _, err = run(capsys, "calibrate", "--model", model_dir, "--prompts", prompts, "--chat")
    assert code == 2
    assert "has no chat template; give its prompts as they are" in err


def test_prompts_of_a_chat_are_what_the_template_makes_of_them():
    llm = LLM("graft-tiny", num_slots=600)
    llm.loaded.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    made = tokenized(llm, [Session((), ("word",))], 1, lambda text: user_message(llm, text))
    ((_, (prompt,)),) = made.sessions
    assert llm.loaded.tokenizer.decode(prompt) == "<user>word<assistant>"


class TestSummary:
    def results(self, losses, count=300):
        from kvgraft.bench.calibrate import NotchSample

        samples = {"full": NotchSample([0.0] * count)}
        for name, lost in losses.items():
            samples[name] = NotchSample([1.0] * lost + [0.0] * (count - lost))
        return summed_up(samples, Asked(Loss.parse("first_token"), 0.02, 0.05))

    def test_certifies_up_to_the_first_failure(self):
        results = self.results({"50 %": 0, "25 %": 1, "10 %": 6, "none": 0})
        assert [result.is_certified for result in results] == [True, True, False, False]

    def test_nothing_where_the_most_conservative_one_fails(self, model_dir):
        results = self.results({"50 %": 9, "none": 0})
        assert not any(result.is_certified for result in results)
        llm = LLM(model_dir, num_slots=2_000)
        assert calibration_of(llm, results, Asked(Loss.parse("first_token"), 0.02, 0.05), 300).notch == "full"


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
        assert tokenized(llm, [Session((), ("short", PASSAGE * 40))], 1).num_too_long == 1
        with pytest.raises(ConfigError, match="no prompt has at most"):
            tokenized(llm, [Session((), (PASSAGE * 40,))], 1)


def test_arguments_are_checked_before_anything_is_loaded(capsys, prompts):
    for options, words in (
        (("--epsilon", "0"), "--epsilon must lie between 0 and 1"),
        (("--delta", "1"), "--delta must lie"),
        (("--loss", "top1"), "unknown loss 'top1'"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--output", "/nowhere/at/all.json"), "there is no such folder"),
    ):
        code, out, err = run(capsys, "calibrate", "--model", "nowhere", "--prompts", prompts, *options)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


def test_notches_are_ordered_by_what_they_compute_again(model_dir):
    for selection in ("query_seam", "first_k", "none"):
        policies = [notch.policy for notch in notches_of(LLM(model_dir, num_slots=600, selection=selection).policy)]
        assert policies[0] is None
        ratios = [policy.recompute_ratio for policy in policies[1:]]
        assert ratios == sorted(ratios, reverse=True)
        assert np.unique(ratios).size == len(ratios)
