"""How long the command line takes to answer: help, mistakes, and a good start until the server is ready.

    python benchmarks/startup.py [--runs 5] [--json]

Prints the median of each, in milliseconds of wall time, of processes that start one after another on a machine that should do
nothing else. Mistakes have to end with exit code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

_KVGRAFT = (sys.executable, "-m", "kvgraft")


def _mistakes(taken_port: int) -> dict[str, tuple[str, ...]]:
    return {
        "wrong path: serve --model /nope": ("serve", "--model", "/nope"),
        "port in use: serve --port N": ("serve", "--port", str(taken_port)),
        "wrong setting: serve --reuse grfat": ("serve", "--reuse", "grfat"),
        "wrong flag: serve --prot 8000": ("serve", "--prot", "8000"),
        "wrong path: generate --model /nope": ("generate", "--model", "/nope", "Hello"),
    }


def _seconds(arguments: tuple[str, ...], exit_code: int | None) -> float:
    started = time.perf_counter()
    done = subprocess.run([*_KVGRAFT, *arguments], capture_output=True, text=True, check=False, env=_environment())
    seconds = time.perf_counter() - started
    if exit_code is not None and done.returncode != exit_code:
        sys.exit(f"kvgraft {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-500:]}")
    return seconds


def _until_ready() -> float:
    """Seconds until `kvgraft serve` says that it serves graft-tiny."""
    started = time.perf_counter()
    with subprocess.Popen(
        [*_KVGRAFT, "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        seconds = time.perf_counter() - started
        server.send_signal(signal.SIGINT)
        server.wait()
    if b"serves graft-tiny" not in line:
        sys.exit(f"the server did not start: {line!r}")
    return seconds


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVGRAFT_")}


def measure(runs: int) -> dict[str, float]:
    """Median milliseconds by case; the first run of each fills caches and does not count."""
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        cases = {name: (arguments, 2) for name, arguments in _mistakes(taken.getsockname()[1]).items()}
        cases |= {
            "--help": (("--help",), 0),
            "--version": (("--version",), 0),
            "serve --help": (("serve", "--help"), 0),
        }
        found = {
            name: statistics.median([_seconds(*case) for _ in range(runs + 1)][1:]) * 1e3
            for name, case in cases.items()
        }
    found["good start: serve graft-tiny"] = statistics.median([_until_ready() for _ in range(runs + 1)][1:]) * 1e3
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure start-up times.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    found = measure(args.runs)
    if args.json:
        print(
            json.dumps(
                {"median_ms": {name: round(value) for name, value in found.items()}, "runs": args.runs}, indent=1
            )
        )
        return
    width = max(map(len, found))
    for name, milliseconds in found.items():
        print(f"{name:{width}s} {milliseconds:>8,.0f} ms")


if __name__ == "__main__":
    main()
