"""`kvgraft explain`: the report of one request, in words."""

from __future__ import annotations

import json

import pytest

from kvgraft.cli import main

ATTEMPT = {
    "num_tokens": 350,
    "exact_tokens": 30,
    "shifted_tokens": 300,
    "substituted_tokens": 0,
    "recomputed_tokens": 8,
    "computed_tokens": 20,
    "policy": "first_k",
    "miss": None,
    "spans": [{"target_start": 30, "length": 300, "fidelity": "shifted", "generation": 0}],
    "sources": [{"request": "donor", "position": 150, "tier": "host"}],
    "timings_ms": {"lookup": 0.31, "graft": 1.5},
    "prefill_steps": 2,
}
MISS = {**ATTEMPT, "spans": [], "sources": [], "shifted_tokens": 0, "miss": {"reason": "no_match", "detail": "nothing"}}


@pytest.fixture
def report_file(tmp_path):
    path = tmp_path / "reports.jsonl"
    entries = [
        {"request_id": "abc1", "outcome": "finished", "output_tokens": 4, "attempts": [ATTEMPT]},
        {"request_id": "def2", "outcome": "aborted", "output_tokens": 0, "attempts": [ATTEMPT, MISS]},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def test_report_is_told_in_words(report_file, capsys):
    assert main(["explain", "--request-id", "abc", "--file", report_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "request abc1: finished, 4 tokens generated",
        "       30 of 350 prompt tokens reused exactly",
        "      300 of 350 prompt tokens copied from another position",
        "       20 of 350 prompt tokens computed",
        "        8 of the computed ones by policy first_k",
        "  " + "#" * 7 + "=" * 67 + "." * 4,
        "  # exact   + continued   = shifted   ~ substituted   o recomputed   . computed",
        "  positions 30-329 from position 150 of request donor (host memory, moved by",
        "    -120, shifted, generation 0)",
        "  2 prefill steps",
        "  lookup                   0.31 ms --------",
        "  graft                    1.50 ms         ------------------------------------",
    ]


@pytest.mark.parametrize(
    ("risk", "line"),
    [
        ({"status": "uncalibrated", "reason": "nobody knows"}, "uncalibrated; nobody knows"),
        (
            {
                "status": "certified",
                "epsilon": 0.02,
                "delta": 0.05,
                "loss": "first_token",
                "notch": "10 %",
                "audits": 300,
            },
            "certified; first_token at most 0.02 with a probability of being wrong of 0.05, notch '10 %', 300 audits",
        ),
    ],
)
def test_risk_and_correction_are_told(tmp_path, capsys, risk, line):
    path = tmp_path / "reports.jsonl"
    attempt = {**ATTEMPT, "risk": risk, "corrected_tokens": 280}
    path.write_text(json.dumps({"request_id": "a", "outcome": "finished", "output_tokens": 4, "attempts": [attempt]}))
    assert main(["explain", "--request-id", "a", "--file", str(path)]) == 0
    out = capsys.readouterr().out
    assert "      280 of the copied ones corrected by their drift" in out.splitlines()
    assert f"risk of the copied tokens: {line}" in " ".join(out.split())


@pytest.mark.parametrize(("source_id", "words"), [("doc-7", "doc-7"), ("", "without a name")])
def test_another_text_that_stood_in_is_named(tmp_path, capsys, source_id, words):
    substitution = {"source_id": source_id, "metadata": {"similarity": 0.83}}
    entry = {
        "request_id": "a",
        "outcome": "finished",
        "output_tokens": 4,
        "attempts": [ATTEMPT | {"substitution": substitution}],
    }
    path = tmp_path / "reports.jsonl"
    path.write_text(json.dumps(entry))
    assert main(["explain", "--request-id", "a", "--file", str(path)]) == 0
    assert f"  another text stands in: {words}, similarity 0.83" in capsys.readouterr().out.splitlines()


def test_retracted_request_has_several_attempts(report_file, capsys, monkeypatch):
    monkeypatch.setenv("KVGRAFT_REPORT_FILE", report_file)
    assert main(["explain", "--request-id", "def2"]) == 0
    text = capsys.readouterr().out
    assert "attempt 1 of 2 (lost its slots)" in text
    assert "nothing copied: no_match; nothing" in text


def test_json_is_the_report_as_it_is(report_file, capsys):
    assert main(["explain", "--request-id", "abc1", "--file", report_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attempts"] == [ATTEMPT]


def test_missing_request_file_and_setting_are_told(report_file, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("KVGRAFT_REPORT_FILE", raising=False)
    assert main(["explain", "--request-id", "zzz", "--file", report_file]) == 1
    assert main(["explain", "--request-id", "a", "--file", str(tmp_path / "absent")]) == 2
    assert main(["explain", "--request-id", "a"]) == 2
    assert "KVGRAFT_REPORT_FILE" in capsys.readouterr().err


def test_without_an_id_all_are_listed_and_two_are_compared(report_file, capsys, tmp_path):
    assert main(["explain", "--file", report_file]) == 0
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["request", "abc1", "def2", "no_match:"]
    assert main(["explain", "--file", report_file, "--diff", "abc", "def"]) == 0
    assert "shifted tokens              300          0  -300" in capsys.readouterr().out
    assert main(["explain", "--file", report_file, "--diff", "abc", "absent"]) == 1
    assert "no request absent" in capsys.readouterr().out


def test_a_page_needs_nothing_else(report_file, capsys, tmp_path):
    path = tmp_path / "page.html"
    assert main(["explain", "--file", report_file, "--diff", "abc", "def", "--html", str(path)]) == 0
    page = path.read_text()
    assert page.count("<h1>") == 2
    assert "http" not in page.replace("http-equiv", "")
    assert main(["explain", "--file", report_file, "--request-id", "abc", "--html", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.usefixtures("looks_are_free")
def test_the_text_of_an_answer_is_shown_where_it_is_asked_for(capsys, tmp_path):
    from kvgraft.engine import LLM, SamplingParams
    from kvgraft.models import bundled_model_path
    from kvgraft.reuse.report import report_as_dict

    llm, once = LLM("graft-tiny", num_slots=3_000), SamplingParams(1)
    document = "def area(width, height):\n    return width * height  # a naïve one\n" * 20
    prompt = "# Nobody has read this line.\n" + document
    llm.generate(document, once)
    (output,) = llm.generate(prompt, once)
    runs = output.report.recomputed_runs
    assert sum(length for _, length in runs) == output.report.recomputed_tokens > 0
    answers, text, tokenizer = tmp_path / "answer.json", tmp_path / "prompt", str(bundled_model_path())
    answers.write_text(json.dumps({"id": "a", "kvgraft": report_as_dict(output.report)}))
    text.write_text(prompt)
    assert main(["explain", "--file", str(answers)]) == 0
    assert "naïve" not in capsys.readouterr().out
    assert main(["explain", "--file", str(answers), "--tokenizer", tokenizer, "--prompt", str(text)]) == 0
    out = capsys.readouterr().out
    assert "    . # Nobody has read this line." in out
    assert sum("naïve" in line for line in out.splitlines()) == 20
    answers.write_text(
        json.dumps(
            {"id": "a", "kvgraft": report_as_dict(output.report), "prompt_token_ids": output.prompt_token_ids.tolist()}
        )
    )
    assert main(["explain", "--file", str(answers), "--tokenizer", tokenizer]) == 0
    assert "    . # Nobody has read this line." in capsys.readouterr().out
    text.write_text(prompt + "more")
    assert main(["explain", "--file", str(answers), "--tokenizer", tokenizer, "--prompt", str(text)]) == 2
    assert "chat template applied" in capsys.readouterr().err
    assert main(["explain", "--file", str(answers), "--prompt", str(text)]) == 2
    assert main(["explain", "--file", str(answers), "--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_what_a_prompt_cost_is_told_beside_a_full_prefill(tmp_path, capsys):
    path = tmp_path / "reports.jsonl"
    counted = {**ATTEMPT, "computed_flops": 1.234e11, "full_flops": 4.936e11}
    entries = [{"request_id": name, "attempts": [attempt]} for name, attempt in (("a", counted), ("b", ATTEMPT))]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert main(["explain", "--request-id", "a", "--file", str(path)]) == 0
    line = "25% of the operations of a full prefill (123.4 of 493.6 GFLOP)"
    assert f"  {line}" in capsys.readouterr().out.splitlines()
    assert main(["explain", "--request-id", "a", "--file", str(path), "--html", str(tmp_path / "a.html")]) == 0
    assert line in (tmp_path / "a.html").read_text()
    capsys.readouterr()
    assert main(["explain", "--request-id", "b", "--file", str(path)]) == 0
    assert "operations" not in capsys.readouterr().out
