"""`kvgraft bench fidelity` from the command line: files, resuming, and arguments that nobody means."""

from __future__ import annotations

import json

import pytest

from kvgraft.cli import main
from kvgraft.testing.tiny_models import tiny_model

pytestmark = pytest.mark.slow


def without_stages(err):
    """What stands on stderr besides what the start was at."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.endswith(" ...\n"))


@pytest.fixture
def run(model_dir, capsys):
    """Run the command on a tiny model; gives exit code, output and errors."""

    def command(*argv):
        code = main(["bench", "fidelity", *argv, "--model", model_dir, "--num-slots", "4000"])
        out, err = capsys.readouterr()
        return code, out, without_stages(err)

    return command


def test_files_say_everything_and_a_second_run_goes_on(run, tmp_path, monkeypatch):
    file, plot = tmp_path / "f.json", tmp_path / "f.png"
    options = ("builtin", "--limit", "3", "--policy", "none", "query_seam", "--budget", "0.1", "--noise-floor", "1")
    options += ("--max-prompt-tokens", "1000", "--json", str(file), "--plot", str(plot))
    code, out, err = run(*options)
    assert (code, err) == (0, "")
    written = json.loads(file.read_text())
    assert {"commit", "versions", "seed", "model", "dtype", "split", "command"} <= set(written["meta"])
    rows = {row["setting"]: row for row in written["rows"]}
    assert list(rows) == ["none", "query_seam:0.1"]
    for row in rows.values():
        assert row["suite"] == "builtin"
        assert row["requests"] == 3
        assert 0 < row["n"] == row["grafted_requests"]
        assert row["mean_kl"] > 1e-9
        assert 0 < row["flops_share"] < 1
        assert row["task_off"] is not None
        assert row["by_distance"]
    assert {row["control"] for row in written["controls"]} == {"exact", "negative", "noise"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "query_seam:0.1" in out
    journal = tmp_path / "f.requests.jsonl"
    assert len(journal.read_text().splitlines()) == 1 + 3
    assert not any(word in journal.read_text() for word in ("Question", "Answer"))

    code, out, _ = run(*options)
    assert code == 0
    assert "going on after 3 requests" in out
    assert json.loads(file.read_text())["rows"] == written["rows"]

    code, out, err = run(*options, "--seed", "5")
    assert (code, out) == (2, "")
    assert "other arguments (seed)" in err
    assert err.count("\n") == 1

    monkeypatch.setattr("kvgraft.bench.fidelity.meta.commit", lambda: "f00")
    code, _, err = run(*options)
    assert (code, "other arguments (code)" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("rag", "--data", "/nowhere"), "'builtin'"),
        (("builtin", "--policy", "magic"), "unknown policy 'magic'"),
        (("builtin", "--policy", "query_seam", "--budget", "2"), "0 < ratio <= 1"),
        (("builtin", "--limit", "0"), "--limit must be at least 1"),
        (("builtin", "--noise-floor", "-1"), "--noise-floor must be at least 0"),
        (("builtin", "--json", "/nowhere/f.json"), "the folder does not exist"),
        (("builtin", "--max-prompt-tokens", "20"), "no request to measure"),
        (("builtin", "builtin"), "named twice"),
    ],
)
def test_wrong_arguments_get_one_line(run, argv, words):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_models_with_sliding_windows_are_measured_like_others(tmp_path, capsys):
    from transformers import AutoTokenizer

    from kvgraft.models import bundled_model_path

    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    tiny_model("gemma2", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "f.json"
    options = ("--limit", "2", "--noise-floor", "0", "--policy", "none", "--num-slots", "4000", "--json", str(file))
    assert main(["bench", "fidelity", "builtin", "--model", str(tmp_path), *options]) == 0
    capsys.readouterr()
    (row,) = json.loads(file.read_text())["rows"]
    assert row["n"] > 0
    assert row["mean_kl"] > 0
    assert row["task_on"] is not None
    assert row["gold_nll_delta"] is not None


def test_a_model_without_a_tokenizer_is_refused(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path)
    capsys.readouterr()  # the library's progress bar
    code = main(["bench", "fidelity", "builtin", "--model", str(tmp_path), "--num-slots", "2000"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "has no tokenizer" in err
    assert without_stages(err).count("\n") == 1
