"""Run a benchmark that prints JSON and keep its result with what is needed to repeat it.

    python benchmarks/record.py NAME -- kvgraft bench ttft --json ...

Writes `benchmarks/results/NAME.json`: command, commit, versions, machine, date and the printed JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("kvgraft", "numpy", "torch", "transformers", "tokenizers")
_RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the command after `--` and write its record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="file name of the record, without .json")
    parser.add_argument("command", nargs="+", help="the benchmark, after --")
    args = parser.parse_args()
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    finished = subprocess.run(args.command, stdout=subprocess.PIPE, check=False, env=environment)
    if finished.returncode:
        return finished.returncode
    is_changed = _git("status", "--porcelain", "src", "benchmarks/suite")
    record = {
        "command": " ".join(args.command),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if is_changed else ""),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_cpu_model()}, {_gpu()}",
        "result": json.loads(finished.stdout),
    }
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _gpu() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return "; ".join(found.splitlines()) or "no GPU"


if __name__ == "__main__":
    sys.exit(main())
