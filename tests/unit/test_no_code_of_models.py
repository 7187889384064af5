"""A model's directory holds data: nothing in it runs code, and nobody is asked whether it may."""

from __future__ import annotations

import json
import shutil

import pytest

from kvgraft.cli import main
from kvgraft.engine.model.loading import load_model
from kvgraft.errors import KVGraftError
from kvgraft.models import bundled_model_path
from kvgraft.router.prompts import load_tokenizer

EVIL = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
(Path(r"{marker}")).touch()
class EvilConfig(PreTrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def _willing(monkeypatch):
    """Somebody, or a pipe, says yes to whatever is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


@pytest.fixture(params=["config", "tokenizer", "tokenizer of a known class"])
def evil(request, tmp_path):
    """A copy of the bundled model that brings code, and what exists once that ran."""
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(bundled_model_path(), folder)
    (folder / "evil.py").write_text(EVIL.format(marker=marker))
    if request.param == "config":
        edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    else:
        name = "EvilTokenizer" if request.param == "tokenizer" else "PreTrainedTokenizerFast"
        auto_map = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
        edit(folder / "tokenizer_config.json", tokenizer_class=name, auto_map=auto_map)
    return str(folder), marker


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_code_of_a_model_never_runs(load, evil):
    name, marker = evil
    said = ""
    try:
        load(name)
    except KVGraftError as error:
        said = str(error)
    assert "\n" not in said
    assert "trust_remote_code" not in said
    assert not marker.exists()


@pytest.mark.parametrize("command", [["doctor"], ["generate", "x"], ["serve", "--port", "0"]])
def test_commands_refuse_it_in_a_line(command, tmp_path, capsys):
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(bundled_model_path(), folder)
    (folder / "evil.py").write_text(EVIL.format(marker=marker))
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    assert main([*command, "--model", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "never runs" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not marker.exists()
