"""Input that nobody means: one line that names the remedy and exit code 2, never a traceback."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.explain.test_requests import report

from kvgraft.cli import calibrate, main
from kvgraft.cli.output_files import write_whole
from kvgraft.testing.tiny_models import tiny_model

HOST_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("KVGRAFT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused; gives the line that says why."""

    def run(*argv):
        try:
            code = main(argv)
        except SystemExit as stop:  # argparse, behind its usage
            code = stop.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        lines = [line for line in err.splitlines() if not line.startswith(("usage: ", " "))]
        lines = [line for line in lines if not line.endswith(" ...")]  # stages of the start
        assert len(lines) == 1
        assert lines[0].startswith("kvgraft")
        return lines[0]

    return run


@pytest.fixture(scope="module")
def bare_model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return str(path)


def in_a_shell(*argv, **options):
    return subprocess.run([sys.executable, "-m", "kvgraft", *argv], capture_output=True, check=False, **options)


class TestText:
    @pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
    def test_undecodable_stdin(self, refused, monkeypatch, errors):
        stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        line = refused("generate")
        assert "standard input is not UTF-8 text" in line
        assert "iconv" in line

    def test_closed_stdin(self, refused, monkeypatch):
        monkeypatch.setattr(sys, "stdin", None)
        assert "no prompt was given" in refused("generate")

    @pytest.mark.parametrize(
        "argv",
        [
            ("generate", "caf\udce9"),
            ("generate", "--stop", "\udcff", "x"),
            ("generate", "--model", "\udcff", "x"),
            ("generate", "--file", "\udcff"),
            ("serve", "--host", "\udcff"),
            ("serve", "--model", "\udcff"),
            ("config", "show", "--served-model-name", "\udcff"),
            ("config", "validate", "\udcff.yaml"),
            ("doctor", "--model", "\udcff"),
            ("explain", "--request-id", "\udcff", "--file", "x"),
            ("bench", "reuse", "\udcff"),
            ("bench", "serve", "--api-key", "\udcff", "--url", "http://127.0.0.1:9", "builtin:rag"),
            ("\udcff",),
        ],
    )
    def test_undecodable_argument(self, refused, argv):
        line = refused(*argv)
        assert "is not UTF-8 text" in line
        assert "encoding" in line

    def test_both_from_a_shell(self):
        for argv, given in (([b"generate", b"caf\xe9"], b""), ([b"generate"], b"caf\xe9")):
            done = in_a_shell(*argv, input=given)
            assert (done.returncode, done.stdout) == (2, b"")
            assert done.stderr.count(b"\n") == 1
            assert b"is not UTF-8 text" in done.stderr

    def test_text_of_a_pack_that_is_none(self, refused, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"input": "half \\ud800 a character"}\n')
        assert "a.jsonl:1" in refused("bench", "reuse", str(tmp_path / "a"))


class TestFiles:
    @pytest.mark.parametrize(
        "argv",
        [
            ("generate", "--file", "a\0b"),
            ("generate", "--config", "a\0b", "x"),
            ("generate", "--model", "a\0b", "x"),
            ("config", "validate", "a\0b"),
            ("config", "show", "--config", "a\0b"),
            ("explain", "--request-id", "x", "--file", "a\0b"),
            ("bench", "reuse", "a\0b"),
            ("bench", "reuse", "--tokenizer", "a\0b", "x"),
            ("bench", "serve", "--json", "a\0b", "builtin:rag"),
        ],
    )
    def test_nul_in_a_path(self, refused, argv):
        assert "NUL" in refused(*argv)

    @pytest.mark.parametrize("name", ["model", "host", "served_model_name", "radix_cache_backend"])
    @pytest.mark.parametrize("text", ["a\0b", "\ud800"])
    def test_text_in_a_file_that_is_none(self, refused, tmp_path, name, text):
        path = tmp_path / "a.json"
        path.write_text(json.dumps({name: text}))
        line = refused("config", "validate", str(path))
        assert f"{name} must be text without NUL" in line

    @pytest.mark.parametrize(
        "text",
        [
            "port: " + "[" * 3_000 + "]" * 3_000,
            "port: " + "{a: " * 3_000 + "}" * 3_000,
            "- " * 3_000,
            "\n".join(" " * i + "a:" for i in range(1_400)),
            ("- " * (1 << 19))[: (1 << 20) - 1],
            "[" * ((1 << 20) - 1),
        ],
        ids=["flow list", "flow map", "block list", "block map", "a MiB of lists", "a MiB of brackets"],
    )
    def test_deep_yaml(self, refused, tmp_path, text):
        path = tmp_path / "deep.yaml"
        path.write_text(text)
        line = refused("config", "validate", str(path))
        assert "nested more than" in line
        assert "port: 8000" in line

    def test_yaml_that_repeats_itself(self, refused, tmp_path):
        path = tmp_path / "many.yaml"
        path.write_text("a: &a [x, x, x]\nb: &b [*a, *a, *a]\n")
        assert "alias" in refused("config", "validate", str(path))

    @pytest.mark.parametrize("name", ["large.yaml", "large.json"])
    def test_large_file(self, refused, tmp_path, name):
        path = tmp_path / name
        path.write_text(" " * (1 << 20) + "{}")
        assert "larger than 1 MiB" in refused("config", "validate", str(path))

    def test_deep_json(self, refused, tmp_path):
        deep = "[" * 100_000
        for name in ("a.jsonl", "b.jsonl"):
            (tmp_path / name).write_text(deep)
        assert "a.jsonl:1" in refused("bench", "reuse", str(tmp_path / "a"))
        assert "b.jsonl" in refused("explain", "--request-id", "x", "--file", str(tmp_path / "b.jsonl"))

    def test_report_that_cannot_be_written_is_told_before_measuring(self, refused, tmp_path):
        assert "is a folder" in refused("bench", "serve", "--json", str(tmp_path), "builtin:rag")
        assert "does not exist" in refused("bench", "serve", "--plot", str(tmp_path / "no" / "a.png"), "builtin:rag")


class TestOutput:
    """Output that cannot be written: said in one line, and what was there before is still there."""

    @pytest.mark.parametrize("argv", [("config", "show"), ("config", "show", "--changed")])
    def test_standard_output_without_room(self, argv):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "kvgraft", *argv], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.stderr == "kvgraft: No space left on device; give a place that can be used, or make room there\n"
        assert done.returncode == 2

    def test_output_that_nobody_reads_is_no_error(self):
        read, write = os.pipe()
        os.close(read)
        with open(write, "wb") as broken:
            done = subprocess.run(
                [sys.executable, "-m", "kvgraft", "config", "show", "--changed"],
                stdout=broken,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert (done.returncode, done.stderr) == (0, b"")

    def test_a_file_without_room_stays_what_it_was(self, tmp_path):
        (tmp_path / "answer.json").write_text(json.dumps({"id": "a", "kvgraft": report()}))
        page = tmp_path / "page.html"
        page.write_text("before")
        code = (
            "import resource, sys; from kvgraft.cli import main\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            f"sys.exit(main(['explain', '--file', {str(tmp_path / 'answer.json')!r}, '--html', {str(page)!r}]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"{page} cannot be written: File too large" in done.stderr
        assert page.read_text() == "before"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.json", "page.html"]

    def test_a_file_is_written_where_it_lies_and_keeps_its_rights(self, tmp_path):
        kept, link = tmp_path / "kept", tmp_path / "link"
        kept.write_text("before")
        kept.chmod(0o640)
        link.symlink_to(kept)
        write_whole(link, "after \ud800")
        assert link.is_symlink()
        assert kept.read_text() == "after ?"
        assert kept.stat().st_mode & 0o777 == 0o640
        write_whole(fresh := tmp_path / "new", "text")
        assert fresh.read_text() == "text"
        write_whole(Path("/dev/null"), "text")
        assert Path("/dev/null").is_char_device()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--output", "."), "is a folder"),
            (("--output", "no/such"), "the folder does not exist"),
            (("--plot", "no/such.png"), "the folder does not exist"),
        ],
    )
    def test_a_calibration_that_cannot_be_written_is_told_before_measuring(
        self, refused, monkeypatch, tmp_path, options, words
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(calibrate, "load_llm", None)  # it is not come to
        assert words in refused("calibrate", "--prompts", "builtin", *options)


class TestNumbers:
    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (("demo", "--documents", "0"), "--documents between 1 and 24"),
            (("demo", "--documents", "25"), "--documents between 1 and 24"),
        ],
    )
    def test_numbers_that_mean_nothing(self, refused, monkeypatch, tmp_path, argv, words):
        monkeypatch.chdir(tmp_path)
        assert words in refused(*argv, "--device", "cpu")


class TestVariables:
    @pytest.mark.parametrize(
        ("variable", "hint"),
        [
            ("KVGRAFT_MAX_RUNING", "did you mean KVGRAFT_MAX_RUNNING?"),
            ("KVGRAFT_LOOKUP_DEADLINE", "did you mean KVGRAFT_LOOKUP_DEADLINE_MS?"),
            ("KVGRAFT_CONFG", "did you mean KVGRAFT_CONFIG?"),
            ("kvgraft_port", "did you mean KVGRAFT_PORT?"),
            ("KVGRAFT_XYZZY", "unset it"),
        ],
    )
    @pytest.mark.parametrize("argv", [("config", "show"), ("serve",), ("generate", "x")])
    def test_misspelt_variable(self, refused, monkeypatch, variable, hint, argv):
        monkeypatch.setenv(variable, "1")
        line = refused(*argv)
        assert f"{variable} is no setting" in line
        assert hint in line

    def test_variables_of_other_engines_and_of_kubernetes_are_let_be(self, capsys, monkeypatch):
        monkeypatch.setenv("KVGRAFT_PHASE_COST_TOKENS", "64")
        monkeypatch.setenv("KVGRAFT_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv("KVGRAFT_SERVICE_PORT_HTTP", "80")
        monkeypatch.setenv("KVGRAFT_PORT_8000_TCP_ADDR", "10.0.0.1")
        monkeypatch.setenv("KVGRAFT_CHAT_PORT", "tcp://10.0.0.1:80")
        assert main(["config", "show"]) == 0
        err = capsys.readouterr().err
        assert err == "kvgraft: KVGRAFT_PHASE_COST_TOKENS is ignored: it is a setting of the SGLang backend\n"

    def test_embedded_engine_refuses_them_too(self, monkeypatch):
        from kvgraft.engine import LLM
        from kvgraft.errors import ConfigError

        monkeypatch.setenv("KVGRAFT_NUM_SLOT", "100")
        with pytest.raises(ConfigError, match="KVGRAFT_NUM_SLOT is no setting; did you mean KVGRAFT_NUM_SLOTS"):
            LLM()


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("8GB", 8 * 10**9),
            ("2G", 2 * 10**9),
            ("512 MB", 512 * 10**6),
            ("1.5GiB", 3 << 29),
            ("0.3GB", 300_000_000),
            ("2Gi", 2 << 30),
            ("64k", 64_000),
            ("1tib", 1 << 40),
            ("123B", 123),
            ("123", 123),
            ("1.9B", 1),
        ],
    )
    def test_usual_units(self, capsys, text, expected):
        assert main(["config", "show", "--format", "json", "--kv-bytes", text]) == 0
        assert json.loads(capsys.readouterr().out)["kv_bytes"]["value"] == expected

    @pytest.mark.parametrize("text", ["8GG", "GB", "1,5GB", "-1GB", "1.5", "1e9", "8 G B", "0x10", "8Gib/s", "٣GB"])
    def test_what_is_no_size(self, refused, text):
        assert "kv_bytes must be a whole number or a size such as 4GiB, 8GB or 1.5GiB" in refused(
            "config", "show", f"--kv-bytes={text}"
        )

    @pytest.mark.parametrize("name", ["host_bytes", "kv_bytes", "donor_tokens", "num_slots", "max_rows"])
    def test_more_than_any_machine_counts(self, refused, tmp_path, name):
        path = tmp_path / "a.json"
        path.write_text(json.dumps({name: 10**30}))
        assert f"{name} must be at most" in refused("config", "validate", str(path))

    @pytest.mark.parametrize(("name", "value"), [("donor_tokens", 10**12), ("host_bytes", 10**15)])
    def test_more_than_this_machine_has(self, refused, monkeypatch, bare_model_dir, name, value):
        monkeypatch.setenv("KVGRAFT_NUM_SLOTS", "100")
        monkeypatch.setenv(f"KVGRAFT_{name.upper()}", str(value))
        line = refused("doctor", "--model", bare_model_dir)
        (fitting,) = re.findall(rf"{name}={value} .* give (\d+) or less$", line)
        assert 0 < int(fitting) < HOST_MEMORY

    def test_more_slots_than_this_machine_has(self, refused, bare_model_dir):
        assert "lower num_slots" in refused("doctor", "--model", bare_model_dir, "--num-slots", str(10**12))


class TestLimits:
    LOWEST = ("max_rows", "max_running", "max_waiting", "first_k", "max_generation", "min_run", "donor_tokens")

    def test_lowest_values_that_settings_accept_are_served(self, capsys, tmp_path, model_dir):
        from kvgraft.config import ServerConfig

        rules = ServerConfig.rules()
        settings = {name: int(rules[name].low) for name in (*self.LOWEST, "host_bytes")}
        path = tmp_path / "lowest.json"
        path.write_text(json.dumps(settings))
        prompt = "def area(width, height):\n    return width * height\n"
        argv = ["generate", "--model", model_dir, "--config", str(path), "--num-slots", "200", "--json"]
        assert main([*argv, "--max-new-tokens", "2", prompt, prompt]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 2

    @pytest.mark.parametrize("value", ["1", "15"])
    def test_catalogue_too_small_for_any_text(self, refused, monkeypatch, value):
        monkeypatch.setenv("KVGRAFT_DONOR_TOKENS", value)
        assert f"donor_tokens must be at least 16, not {value}" in refused("config", "show")

    def test_runs_longer_than_all_donors_together(self, refused, tmp_path):
        path = tmp_path / "a.json"
        path.write_text('{"min_run": 1000, "donor_tokens": 999}')
        for argv in (("config", "validate", str(path)), ("config", "show", "--config", str(path))):
            line = refused(*argv)
            assert "donor_tokens=999 hold no run of min_run=1000 tokens" in line
            assert "raise donor_tokens or lower min_run" in line

    def test_model_length_without_room_for_an_answer(self, refused):
        assert "max_model_len must be at least 2" in refused("config", "show", "--max-model-len", "1")
