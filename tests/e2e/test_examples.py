"""Programs of `examples/` that need no other engine; vLLM's, SGLang's and LangChain's run in their environments' tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from tests.docs.code_index import ROOT

EXAMPLES = ROOT / "examples"
ATTEMPTS = 4
pytestmark = pytest.mark.slow
DOCUMENT = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    sides = 6\n" * 20


def run(*command, path=()):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGRAFT_")}
    environ["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_names_every_example():
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert listed == found


def test_a_replica_reuses_what_another_has_read():
    for _ in range(ATTEMPTS):
        first, second = run(EXAMPLES / "replicas_store.py").splitlines()
        assert re.fullmatch(r"first replica: \d+ prompt tokens, 0 reused, because: no_donors", first)
        if found := re.fullmatch(r"second replica: \d+ prompt tokens, (\d+) reused, out of: file", second):
            break  # else the store was read too late, on a busy machine
    assert found, second
    assert int(found[1]) > 1_000


def test_a_policy_out_of_a_package_is_chosen_by_its_name(tmp_path):
    package = shutil.copytree(EXAMPLES / "selection_policy", tmp_path / "package")  # a build writes into it
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site, package)
    prompts = [f"Read this.\n{DOCUMENT}", f"Here are some lines, and then a question.\n{DOCUMENT}"]
    flags = ["--selection", "last_k", "--max-new-tokens", "4"]
    out = run("-m", "kvgraft", "generate", *flags, *prompts, path=[site])
    first, second = re.findall(r"(\d+) shifted; \d+ computed \((\d+) of them again\)", out)
    assert first == ("0", "0")
    assert second[1] == "8"
