"""`kvgraft router`: what it refuses, before anything is opened or loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvgraft.cli import main

WORKER = ("--worker", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a router needs workers; give --worker URL, once per worker"),
        (("--worker", "127.0.0.1:8001"), "a worker begins with its URL"),
        ((*WORKER, *WORKER), "two workers have the name '127.0.0.1:1'"),
        ((*WORKER, "--policy", "best"), "unknown policy 'best'; choose reuse, round_robin"),
        ((*WORKER, "--port", "70000"), "--port must be between 0 and 65535, not 70000"),
        ((*WORKER, "--max-in-flight", "0"), "--max-in-flight must be between 1 and"),
        ((*WORKER, "--max-tokens", "1"), "--max-tokens must be between 1024 and"),
        ((*WORKER, "--gateway", "http://h:1"), "--gateway and --header go together"),
        ((*WORKER, "--header", "X-SMG-Target-Worker"), "--gateway and --header go together"),
        ((*WORKER, "--model", "/no/such/model"), "cannot load the tokenizer of model '/no/such/model'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, capsys):
    assert main(["router", "--port", "0", *arguments]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("kvgraft: ")
    assert message in line


SLOWLY = ("msgspec", "starlette", "prometheus_client", "transformers")


@pytest.mark.parametrize("hidden", ["zmq", "aiohttp", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)])
def test_a_missing_extra_is_named(hidden):
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\nfrom kvgraft.cli import main\n"
        "sys.exit(main(['router', '--port', '0', '--worker', 'http://127.0.0.1:1']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].endswith("pip install 'kvgraft[router]'")
