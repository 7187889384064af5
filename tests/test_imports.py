"""What an import loads, and what it says when an extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])
sys.meta_path.insert(0, Hidden())
"""


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


CORE = [
    "kvgraft",
    "kvgraft.prefix",
    "kvgraft.donors",
    "kvgraft.semantic",
    "kvgraft.reuse",
    "kvgraft.memory",
    "kvgraft.memory.store.file",
    "kvgraft.memory.store.tier",
    "kvgraft.config",
    "kvgraft.cli",
    "kvgraft.router.app",
]
LOADED = """
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    print(module, *{extras} & set(sys.modules))
"""


def test_core_modules_load_neither_torch_nor_transformers():
    """One process for all: the first line that names an extra says who loads it."""
    extras = {"torch", "transformers", "tokenizers", "onnxruntime", "usearch"}
    result = run_python(LOADED.format(modules=CORE, extras=extras))
    assert result.stdout.splitlines() == CORE, result.stderr


@pytest.mark.parametrize("missing", ["torch", "transformers", "tokenizers"])
def test_missing_extra_is_named(missing):
    result = run_python(HIDE.format(hidden={missing}) + "import kvgraft.engine")
    assert result.returncode == 1
    assert (
        result.stderr.strip().splitlines()[-1]
        == f"ImportError: kvgraft.engine needs {missing}: pip install 'kvgraft[torch]'"
    )


def test_engine_classes_of_the_package_are_loaded_when_they_are_used():
    code = """
import sys, kvgraft
assert "torch" not in sys.modules and "kvgraft.engine" not in sys.modules
from kvgraft import LLM, AsyncLLM, SamplingParams
import kvgraft.engine
for name in ("LLM", "AsyncLLM", "SamplingParams"):
    print(globals()[name] is getattr(kvgraft.engine, name), name in kvgraft.__all__)
"""
    result = run_python(code)
    assert result.stdout.split() == ["True"] * 6, result.stderr


def test_engine_class_without_its_extra_names_the_extra():
    result = run_python(
        HIDE.format(hidden={"torch"}) + "import kvgraft; print(kvgraft.__version__)\nfrom kvgraft import LLM"
    )
    assert result.stdout.strip()
    assert (
        result.stderr.strip().splitlines()[-1]
        == "ImportError: kvgraft.engine needs torch: pip install 'kvgraft[torch]'"
    )


def test_package_has_no_other_attributes():
    result = run_python("import kvgraft, sys; assert not hasattr(kvgraft, 'Llm'); assert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_command_line_says_what_is_missing_in_one_line():
    result = run_python(
        HIDE.format(hidden={"torch"}) + "import sys; from kvgraft.cli import main; sys.exit(main(['generate', 'x']))"
    )
    assert result.returncode == 2
    *stages, line = result.stderr.splitlines()
    assert line == "kvgraft: kvgraft.engine needs torch: pip install 'kvgraft[torch]'"
    assert all(stage.endswith(" ...") for stage in stages)
