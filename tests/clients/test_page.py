"""The programs and files of docs/clients.md, run against a server that bears the name they use."""

from __future__ import annotations

import shlex

import pytest
from tests.clients.llm_command import run_llm
from tests.clients.served import ELSEWHERE, IN_CLIENTS_ENVIRONMENT, serving, write_model
from tests.docs.snippets import snippets

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)

PAGE = "docs/clients.md"
PROGRAMS = [snippet for snippet in snippets(PAGE) if snippet.language == "python"]


@pytest.fixture(scope="module")
def without_key(tmp_path_factory):
    with serving(write_model(tmp_path_factory.mktemp("model")), "--served-model-name", "my-model", key="") as served:
        yield served


def test_there_is_one_of_every_library():
    assert {s.text.split()[1].split(".")[0] for s in PROGRAMS} == {
        "openai",
        "langchain_openai",
        "llama_index",
        "litellm",
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda snippet: snippet.place)
def test_programs_run(without_key, program, capsys):
    exec(compile(program.text.replace("http://127.0.0.1:8000", without_key.url), program.place, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_llm_finds_the_server_and_asks_it(without_key, tmp_path):
    (models,) = [snippet.text for snippet in snippets(PAGE) if snippet.language == "yaml"]
    models = models.replace("http://127.0.0.1:8000", without_key.url)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    lines = [shlex.split(line) for s in snippets(PAGE) if s.is_shell for line in s.commands]
    asked = [arguments for program, *arguments in lines if program == "llm"]
    assert len(asked) == 3
    for arguments in asked:
        short = ["-o", "max_tokens", "8"] if arguments[0] == "-m" else []
        assert run_llm(tmp_path, *arguments, *short).strip()
