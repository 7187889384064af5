"""How `kvgraft serve` ends when it is interrupted at its start, or when its engine does not come back from a step."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

PATIENCE_S = 120.0
INTERRUPTED = "kvgraft: interrupted\n"

AT_AN_IMPORT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["kvgraft", "serve", "--port", "0"]
runpy.run_module("kvgraft", run_name="__main__")
"""

IN_A_STEP = """
import sys, time, torch
from kvgraft.cli import main
from kvgraft.engine import core
def hang(*_, **__):
    sys.stderr.write("hangs\\n")
    while True:
        {work}
{method} = hang
sys.exit(main(["serve", "--port", "0", "--num-slots", "600", "--shutdown-grace-s", "0.5"]))
"""


@contextlib.contextmanager
def child(program):
    """A process that runs `program` and that is gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def read_until(stream, part):
    for line in stream:
        if part in line:
            return line
    raise AssertionError(f"no line with {part!r}")


@pytest.mark.parametrize(
    "module", ["numpy.lib._shape_base_impl", "_datetime", "kvgraft.cli.serve", "torch.nn", "uvicorn"]
)
def test_an_interrupt_in_an_import_is_one_line(module):
    with child(AT_AN_IMPORT.format(module=module)) as process:
        _, error = process.communicate()
        assert process.returncode == 130
        assert error.splitlines(keepends=True)[-1] == INTERRUPTED
        assert "Traceback" not in error


def test_an_interrupt_while_the_model_is_checked_is_one_line():
    """The engine's thread is in torch then; an interpreter that ends beside it aborts."""
    with child(IN_A_STEP.format(method="core.self_check", work="torch.ones(96, 96) @ torch.ones(96, 96)")) as process:
        read_until(process.stderr, "hangs")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == INTERRUPTED


def test_sigterm_ends_a_server_whose_engine_does_not_end_its_step():
    with child(IN_A_STEP.format(method="core.Engine.check", work="time.sleep(0.1)")) as process:
        url = read_until(process.stdout, "serves").split(" at ")[1].split("/v1")[0]
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(url + "/health", timeout=PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
        assert "the engine does not end its step" in process.stderr.read()
