"""Every block of README and docs is run, or checked as far as a test can; what is not run is listed here with the reason.

Programs of a page run in order in one namespace, which begins with what the reader is taken to have (`given.py`). The
server that they speak to serves graft-tiny, which stands in for other models, too.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.docs.code_index import ROOT
from tests.docs.given import GIVEN
from tests.docs.pages import PAGES
from tests.docs.snippets import Snippet, snippets
from tests.e2e.test_server import Process

from kvgraft.cli import build_parser, main
from kvgraft.cli.model_options import resolve_settings
from kvgraft.config import ServerConfig, VLLMConfig, resolve
from kvgraft.router import parse_worker

if TYPE_CHECKING:
    from collections.abc import Mapping

ALL = [snippet for page in PAGES for snippet in snippets(page)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SHOWN = {
    "docs/demo.md: 6 questions, prompts of": "what `make demo` prints, with real times",
    "ARCHITECTURE.md: POST /v1/chat/completions": "a diagram; its names are checked in test_pages.py",
    "docs/graft.md: [project.entry-points": "part of a package's pyproject.toml; tests/docs/test_recipes.py installs one",
    "docs/design/prefix-cache.md: match   [root]": "a diagram",
    "docs/design/prefix-cache.md: [ A:": "diagrams",
    "docs/design/prefix-cache.md: device    [": "a diagram",
    "docs/server.md: kvgraft VERSION serves": "the line that tests/e2e/test_server.py reads",
    "docs/server.md: data: {": "events, shortened; tests/e2e/test_verified_server.py reads whole ones",
    "docs/server.md: x-kvgraft-report": "a header of an answer; tests/unit/server",
    "docs/server.md: 2026-11-21T09": "a log line; tests/unit/observability/test_log_format.py",
}
"""Blocks that nobody types: page and first words, and why they are not run."""

NOT_RUN = {
    "serve": "runs until it is stopped",
    "router": "runs until it is stopped",
    "heal": "runs until it is stopped",
    "ui": "runs until it is stopped; run by tests/e2e/test_inspector.py",
    "doctor": "run by tests/e2e/test_cli.py; with --engine it needs the engine",
    "calibrate": "minutes; run at toy size by tests/e2e/test_calibrate.py",
    "bench fidelity": "minutes; run at toy size by tests/unit/cli/test_bench_fidelity.py",
    "bench serve": "minutes; run at toy size by tests/unit/bench/test_bench_serve_command.py",
    "bench ttft": "minutes; run at toy size by tests/e2e/test_cli.py",
    "store verify": "with --remove it deletes; run by tests/unit/cli/test_store.py",
    "store gc": "deletes; run by tests/unit/cli/test_store.py",
    "store export": "needs the key of a donor; run by tests/unit/cli/test_store.py",
}
"""Commands of kvgraft of which the line is parsed and its settings are checked, but which are not run."""

SHORTER = {
    "kvgraft store ls /var/kv --space SPACE": "kvgraft store ls .",
    "kvgraft store ls /var/kv": "kvgraft store ls .",
}
"""How lines that are run begin in the documentation and in the test."""

OTHER_PROGRAMS = {
    "apt-get": "changes the system",
    "claude": "Claude Code's; docs/clients.md says which one was tried",
    "codex": "Codex's; docs/clients.md says which one was tried",
    "cp": "of the shell",
    "docker": "needs Docker; tests/deploy looks at what it is given",
    "export": "of the shell",
    "install": "of the shell",
    "git": "there is no address to clone from",
    "kubectl": "needs a cluster; tests/deploy looks at the manifests",
    "llm": "tests/clients/test_page.py runs it",
    "lm_eval": "asks a hub; tests/clients/test_lm_eval.py runs it on tasks of its own",
    "make_venv.sh": "downloads gigabytes",
    "make": "targets exist: test_pages.py",
    "mooncake_master": "Mooncake's",
    "npm": "installs",
    "pip": "installs; what it names is checked",
    "python": "scripts and their options exist: test_pages.py",
    "python3": "makes an environment",
    "redis-server": "Redis's",
    "systemctl": "needs systemd; tests/deploy looks at the unit",
    "vllm": "needs vLLM; its --kv-transfer-config is read",
}
"""First words of lines of which only so much is checked."""

SCRIPTS = {
    "docs/server.md: JSON='Content-Type": "run against the server",
    "docs/quickstart/vllm.md: ask()": "speaks to a vLLM server: tests/integration/vllm; its syntax is checked",
    "docs/quickstart/sglang.md: ask()": "speaks to an SGLang server: tests/integration/sglang; its syntax is checked",
}
"""Shell blocks that are more than lines to type one by one."""

PROGRAMS_ELSEWHERE = {"docs/clients.md": "tests/clients/test_page.py runs them, where the clients are installed"}
"""Pages whose programs, and files for them, need packages that are not here."""

TRANSCRIPT_FILES = {
    "server.yaml": "prot: 9000\n",
    "answers.json": (Path(__file__).parent / "answers.json").read_text(),
}

CONVERSATION = json.dumps({"hashed_ip": "a", "conversation": [{"role": "user", "content": "word " * 1_000}]}) + "\n"
"""A line of WildChat."""


def name_of(snippet: Snippet, table: Mapping[str, str]) -> str | None:
    """The entry of a table that means this block."""
    text = f"{snippet.page}: {snippet.text.lstrip()}"
    return next((name for name in table if text.startswith(name)), None)


def shell_commands() -> list[tuple[Snippet, str]]:
    """Lines to type, of all pages."""
    blocks = [s for s in ALL if s.is_shell and name_of(s, SCRIPTS) is None]
    return [(snippet, command) for snippet in blocks for command in snippet.commands]


def words_of(command: str) -> list[str]:
    """Words of the first command of a line, without variables in front of it."""
    words = shlex.split(re.split(r" '?(?:&&|\|)'? ", command)[0])
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def program_of(command: str) -> str:
    """The program of a line, wherever it lies."""
    return words_of(command)[0].rsplit("/", 1)[-1]


KVGRAFT = [(s, c) for s, c in shell_commands() if words_of(c)[0] == "kvgraft"]
OTHERS = [(s, c) for s, c in shell_commands() if words_of(c)[0] != "kvgraft"]


@pytest.fixture(scope="module")
def server():
    """A server on graft-tiny under the name of the documentation; answers without `max_tokens` end soon."""
    process = Process("--served-model-name", "my-model", "--shutdown-grace-s", "1", "--max-model-len", "512")
    yield process
    assert process.close() == 0
    assert "Traceback" not in "".join(process.log)


@pytest.fixture
def small(monkeypatch):
    """Engines that take little memory and do not compute on after their answers."""
    monkeypatch.setenv("KVGRAFT_NUM_SLOTS", "4000")
    monkeypatch.setenv("KVGRAFT_DONOR_TOKENS", "50000")


def is_program(snippet: Snippet) -> bool:
    return snippet.language == "python"


def test_every_block_is_of_a_kind_that_is_checked():
    checked = {"python", "json", "yaml", "ini"}
    unknown = [
        s.place
        for s in ALL
        if s.language not in checked and not s.is_shell and not s.is_transcript and name_of(s, SHOWN | SCRIPTS) is None
    ]
    assert not unknown, "name their language, or list them in SHOWN with a reason"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(is_program, snippets(page))) and page not in PROGRAMS_ELSEWHERE]
)
@pytest.mark.usefixtures("small")
def test_programs_run(page, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = dict(GIVEN.get(page, dict)())
    stand_ins = {'LLM("smollm2-135m")': 'LLM("graft-tiny")'}
    if any("127.0.0.1:8000" in s.text for s in snippets(page) if is_program(s)):
        stand_ins["http://127.0.0.1:8000"] = request.getfixturevalue("server").url
    try:
        for snippet in filter(is_program, snippets(page)):
            text = snippet.text
            for old, new in stand_ins.items():
                text = text.replace(old, new)
            code = compile("\n" * (snippet.line - 1) + text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            exec(code, namespace)  # the traceback names page and line
    finally:
        close_all(namespace)


def close_all(namespace: dict[str, Any]) -> None:
    """End what the programs of a page have begun."""
    for name, value in namespace.items():
        if name == "app":
            asyncio.run(value.state.context.close(0))
        elif not isinstance(value, type) and callable(getattr(value, "close", None)):
            value.close()
        elif callable(getattr(value, "on_shutdown", None)) and not isinstance(value, type):
            value.on_shutdown()


@pytest.mark.parametrize("snippet", [s for s in ALL if s.language == "json"], ids=lambda s: s.place)
def test_json_is_json(snippet):
    json.loads(snippet.text)


@pytest.mark.parametrize(
    "snippet", [s for s in ALL if s.language == "yaml" and s.page not in PROGRAMS_ELSEWHERE], ids=lambda s: s.place
)
def test_yaml_is_settings_or_alerts(snippet, tmp_path):
    if set(yaml.safe_load(snippet.text)) == {"groups"}:
        check_alerts(snippet.text, tmp_path)
        return
    file = tmp_path / "server.yaml"
    file.write_text(snippet.text)
    assert resolve(ServerConfig, {}, str(file)).config


def check_alerts(text, folder):
    """Rules of Prometheus: metrics that they name exist, and promtool takes them where it is installed."""
    named = set(re.findall(r"\b((?:kvgraft|process)[\w:]+)(?=[{\[\s)])", " ".join(re.findall(r"expr: (.*)", text))))
    page = (ROOT / "docs/reference/metrics.md").read_text()
    assert named
    assert not {name for name in named if name.split(":")[-1].removesuffix("_bucket") not in page}
    if shutil.which("promtool"):
        (folder / "rules.yaml").write_text(text)
        subprocess.run(["promtool", "check", "rules", folder / "rules.yaml"], check=True, capture_output=True)


@pytest.mark.parametrize(("snippet", "command"), KVGRAFT, ids=lambda v: v.place if isinstance(v, Snippet) else "")
def test_kvgraft_takes_the_line(snippet, command, monkeypatch):
    """Its options, the values of its settings, and the addresses of workers."""
    for variable in [name for name in os.environ if name.startswith("KVGRAFT_")]:
        monkeypatch.delenv(variable)
    words = [word for word in words_of(command)[1:] if word != "..."]
    try:
        args = build_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"{snippet.place}: kvgraft does not take {command!r}")
    if any(name.startswith("setting_") for name in vars(args)):
        assert resolve_settings(args).config
    for worker in [one for one in words if one.startswith("http") and "events=" in one]:
        assert parse_worker(worker)


def subcommand(command: str) -> str:
    words = words_of(command)[1:]
    return " ".join(words[: 2 if words[0] in {"bench", "store", "config"} else 1])


RUN = [(s, c) for s, c in KVGRAFT if subcommand(c) not in NOT_RUN]


@pytest.mark.parametrize(("snippet", "command"), RUN, ids=lambda v: v.place if isinstance(v, Snippet) else "")
@pytest.mark.usefixtures("small")
def test_the_line_does_what_it_says(snippet, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text("port: 9000\n")
    (tmp_path / "answers.json").write_text(TRANSCRIPT_FILES["answers.json"])
    (tmp_path / "train.jsonl").write_text(2 * CONVERSATION)
    for old, new in SHORTER.items():
        command = re.sub(rf"^{re.escape(old)}(?=$| )", new, command)
    code = main(words_of(command)[1:])
    told = capsys.readouterr()
    assert code == 0, f"{snippet.place}: {command}\n{told.err}"
    assert told.out


def spaced(text: str) -> list[str]:
    """Lines with one blank in the place of several: columns move when a setting is added."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("snippet", [s for s in ALL if s.is_transcript], ids=lambda s: s.place)
def test_transcripts_say_what_is_printed(snippet, tmp_path):
    for name, text in TRANSCRIPT_FILES.items():
        (tmp_path / name).write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGRAFT_")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    for command, lines in snippet.transcript:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert spaced(done.stdout + done.stderr) == spaced("\n".join(lines)), f"{snippet.place}: {command}"


@pytest.mark.parametrize(("snippet", "command"), OTHERS, ids=lambda v: v.place if isinstance(v, Snippet) else "")
def test_what_is_ours_in_lines_of_other_programs(snippet, command):
    assert program_of(command) in OTHER_PROGRAMS, f"{snippet.place}: say in OTHER_PROGRAMS why {command!r} is not run"
    words = words_of(command)
    for word in words:
        for extra in re.findall(r"^(?:\.|kvgraft)\[([\w,]+)\]$", word):
            assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"]), f"{snippet.place}: {word}"
    if "--kv-transfer-config" in words:
        check_connector(json.loads(words[words.index("--kv-transfer-config") + 1]))
    if "sglang.launch_server" in words and "--radix-cache-backend" in words:
        assert words[words.index("--radix-cache-backend") + 1] in PROJECT["entry-points"]["sglang.srt.plugins"]


def check_connector(config: Mapping[str, Any]) -> None:
    """What vLLM is told of a connector of ours names one, and settings that it has."""
    if not str(config["kv_connector"]).startswith("Graft"):
        return
    from kvgraft.integrations import vllm

    assert config["kv_connector"] in vllm.__all__
    assert config["kv_connector_module_path"] == vllm.__name__
    options = dict(config.get("kv_connector_extra_config", {}))
    for connector in options.pop("connectors", ()):
        check_connector(connector)
    VLLMConfig.from_dict(options)


@pytest.mark.parametrize("snippet", [s for s in ALL if name_of(s, SCRIPTS)], ids=lambda s: s.place)
def test_scripts(snippet, server, tmp_path):
    subprocess.run(["bash", "-n"], input=snippet.text, text=True, check=True)
    if SCRIPTS[name_of(snippet, SCRIPTS)] != "run against the server":
        return
    script = snippet.text.replace("localhost:8000", server.url).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lists_name_only_what_there_is():
    """Nothing is excused that is gone."""
    for table in (SHOWN, SCRIPTS):
        assert set(table) == {name_of(snippet, table) for snippet in ALL} - {None}
    assert set(NOT_RUN) == {subcommand(command) for _, command in KVGRAFT} & set(NOT_RUN)
    assert set(OTHER_PROGRAMS) == {program_of(command) for _, command in OTHERS}
    assert set(GIVEN) <= {s.page for s in ALL if is_program(s)}
    lines = [command for _, command in RUN]
    assert not [old for old in SHORTER if not any(line.startswith(old) for line in lines)]


def test_what_is_not_run_is_little():
    """Whoever adds to the lists above looks at this number, too."""
    assert len(SHOWN) <= 10
    assert len(NOT_RUN) <= 13  # four of them are servers
