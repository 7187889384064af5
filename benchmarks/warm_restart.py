"""First request to a server that was killed and started again, over a store that outlived it, against a cold one.

    python benchmarks/warm_restart.py --json

Per run: a server with an empty store answers a document after a question of its own (cold), and is killed with SIGKILL when
the store has it. A second server finds it and answers the same document after another question (warm); with `--same-front`
after the same one, and another question at its end. Both answer a short
prompt first, so that neither pays for what only a first forward pass does. Seconds are from the request to its first token.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvgraft.bench.server_process import ServerProcess, end_on_sigterm
from kvgraft.errors import KVGraftError

_QUESTION_TOKENS = 32
_FIRST_TEXT_ID = 20
_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Run:
    """One kill and restart.

    Attributes:
        tokens: Of the prompt.
        cold_s: To the first token without a store's help.
        warm_s: After the restart.
        found_s: From the moment the second server was ready until it knew what is stored.
        reused_tokens: Of the warm request.
        timings_ms: Of the warm request, by step.
    """

    tokens: int
    cold_s: float
    warm_s: float
    found_s: float
    reused_tokens: int
    timings_ms: dict[str, float]


def first_token(url: str, prompt: list[int]) -> tuple[float, dict[str, object]]:
    """Ask for one token; returns seconds until it is there, and what was reused."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=_WAIT_S) as response:
        answer = json.load(response)
    return time.monotonic() - started, answer["kvgraft"]


def wait_for(url: str, words: tuple[str, ...]) -> float:
    """Seconds until the series of a server's metrics that contain all of these words are above 0."""
    started = time.monotonic()
    while time.monotonic() - started < _WAIT_S:
        with urllib.request.urlopen(url + "/metrics", timeout=_WAIT_S) as response:
            lines = response.read().decode().splitlines()
        if any(float(line.rsplit(" ", 1)[1]) for line in lines if all(word in line for word in words)):
            return time.monotonic() - started
        time.sleep(0.02)
    raise SystemExit(f"warm_restart: {' '.join(words)} stayed at 0")


def measure(args: argparse.Namespace, tokens: int, rng: np.random.Generator) -> Run:
    """Fill a store, kill the server, and ask again."""
    document = rng.integers(_FIRST_TEXT_ID, args.vocab, tokens - 2 * _QUESTION_TOKENS).tolist()

    def question() -> list[int]:
        drawn: list[int] = rng.integers(_FIRST_TEXT_ID, args.vocab, _QUESTION_TOKENS).tolist()
        return drawn

    same = question()

    def prompt() -> list[int]:
        return [*(same if args.same_front else question()), *document, *question()]

    with tempfile.TemporaryDirectory(prefix="kvgraft-warm-", dir=args.folder) as folder:
        arguments = [*shlex.split(args.server_args), "--store", f"file:{Path(folder) / 'donors'}"]
        with ServerProcess(arguments) as server:
            first_token(server.url, rng.integers(_FIRST_TEXT_ID, args.vocab, 48).tolist())
            cold_s, _ = first_token(server.url, prompt())
            wait_for(server.url, ("kvgraft:store_writes_total{", '"stored"'))
            server.kill()
        with ServerProcess(arguments) as server:
            found_s = wait_for(server.url, ("kvgraft:store_cold_donors{",))
            first_token(server.url, rng.integers(_FIRST_TEXT_ID, args.vocab, 48).tolist())
            warm_s, report = first_token(server.url, prompt())
            server.kill()
    return Run(tokens, cold_s, warm_s, found_s, int(report["reused_tokens"]), report["timings_ms"])


def summarise(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Medians by length of prompt."""
    summary = {}
    for tokens in sorted({run.tokens for run in runs}):
        own = [run for run in runs if run.tokens == tokens]
        cold, warm = (statistics.median(getattr(run, name) for run in own) for name in ("cold_s", "warm_s"))
        summary[str(tokens)] = {
            "cold_s": cold,
            "warm_s": warm,
            "times_sooner": cold / warm,
            "reused_share": statistics.median(run.reused_tokens / run.tokens for run in own),
        }
    return summary


def main() -> int:
    """Measure and print."""
    args = _parse()
    end_on_sigterm()
    rng = np.random.default_rng(args.seed)
    runs = []
    try:
        for number in range(args.runs):
            for tokens in args.tokens:
                runs.append(measure(args, tokens, rng))
                print(f"run {number + 1} of {args.runs}: {runs[-1]}", file=sys.stderr, flush=True)
    except KVGraftError as error:
        print(f"warm_restart: {error}", file=sys.stderr)
        return 2
    summary = summarise(runs)
    settings = {name: value for name, value in vars(args).items() if name != "folder"}
    if args.json:
        print(json.dumps({"settings": settings, "summary": summary, "runs": [asdict(run) for run in runs]}, indent=1))
    else:
        for tokens, figures in summary.items():
            print(f"{tokens:>8s} tokens: cold {figures['cold_s']:.2f} s, warm {figures['warm_s']:.2f} s", end=", ")
            print(f"{figures['times_sooner']:.1f} times sooner")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server-args", default="--model smollm2-135m", help="arguments of kvgraft serve")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--same-front", action="store_true", help="both prompts begin alike, and the front is exact")
    parser.add_argument("--folder", help="where the store lies (default: the system's temporary folder)")
    parser.add_argument("--vocab", type=int, default=40_000, help="random token ids are below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
