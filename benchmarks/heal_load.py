"""What background healing costs those who are served: a server at half of its capacity with `heal` off, idle and always.

    python benchmarks/record.py heal-load -- python benchmarks/heal_load.py

The capacity is what a few clients get that each send one request at a time. Then a fresh server per setting and round gets
the same requests at the same times, a Poisson process at `--load` of the capacity; settings take turns within every round.
Figures are percentiles over the requests of all rounds, and their ratio to `off`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.arrivals import arrival_times
from kvgraft.bench.client import CompletionsClient, TimedRequest, completion_body
from kvgraft.bench.load import run_closed_loop, run_open_loop
from kvgraft.bench.serve_workload import load_workload
from kvgraft.bench.server_process import ServerProcess, end_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MODES = ("off", "idle", "always")
HEALED = "kvgraft:healed_tokens_total"
_CLIENTS = 4
_PATIENCE_S = 120.0
_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Run:
    """One setting in one round.

    Attributes:
        mode: Value of `heal`.
        ttft_ms: From scheduled arrival to first token, of each request that ended well.
        gaps_ms: Between tokens of one answer, of all of them.
        failures: Requests that did not end well.
        healed_tokens: What the server says that it healed, warm-up included.
        reused_share: Of prompt tokens.
    """

    mode: str
    ttft_ms: list[float]
    gaps_ms: list[float]
    failures: int
    healed_tokens: float
    reused_share: float


class Load:
    """The requests and the server that gets them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._server_args = ["--model", args.model, "--num-slots", str(args.num_slots), *args.server_args.split()]
        wanted = args.warmup + args.requests
        prompts = load_workload(args.pack, wanted, args.seed).prompts[:wanted]
        self._bodies = [completion_body(text, model=args.model, max_tokens=args.tokens) for text in prompts]

    def capacity(self) -> float:
        """Requests per second that clients get that wait for one another, after the warm-up, with `heal` off."""
        with ServerProcess([*self._server_args, "--heal", "off"]) as server:
            return asyncio.run(self._capacity(server.url))

    async def _capacity(self, url: str) -> float:
        warmup = self._args.warmup
        async with CompletionsClient(url) as client:
            await run_closed_loop(client.stream, self._bodies[:warmup], _CLIENTS)
            exchanges = await run_closed_loop(client.stream, self._bodies[warmup:], _CLIENTS)
        done = [exchange for exchange in exchanges if exchange.succeeded]
        if not done:
            raise SystemExit(f"no request ended well: {exchanges[0].failure}; try kvgraft serve by hand")
        return len(done) / (max(e.ended_s or 0.0 for e in done) - min(e.scheduled_s for e in done))

    def run(self, mode: str, rate: float) -> Run:
        """Serve everything once under one setting."""
        with ServerProcess([*self._server_args, "--heal", mode]) as server:
            exchanges = asyncio.run(self._serve(server.url, rate))
            metrics = urllib.request.urlopen(server.url + "/metrics", timeout=_PATIENCE_S).read().decode()
        return summed(mode, exchanges, healed_tokens(metrics))

    async def _serve(self, url: str, rate: float) -> Sequence[TimedRequest]:
        warmup, bodies = self._args.warmup, self._bodies
        arrivals = arrival_times(None, len(bodies) - warmup, rate, self._args.seed).tolist()
        async with CompletionsClient(url) as client:
            await run_closed_loop(client.stream, bodies[:warmup], _CLIENTS)
            result = await run_open_loop(client.stream, bodies[warmup:], arrivals, give_up_s=_PATIENCE_S)
        return result.exchanges


def healed_tokens(metrics: str) -> float:
    """What a server's metrics say; 0 where they say nothing."""
    return sum(float(value) for value in re.findall(rf"^{HEALED}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE))


def summed(mode: str, exchanges: Sequence[TimedRequest], healed: float) -> Run:
    """Take the times out of what clients noted."""
    done = [exchange for exchange in exchanges if exchange.succeeded]
    prompt_tokens = sum(exchange.prompt_tokens for exchange in done)
    return Run(
        mode,
        [1e3 * exchange.ttft_s for exchange in done if exchange.ttft_s is not None],
        [1e3 * (after - before) for exchange in done for before, after in pairwise(exchange.token_s)],
        len(exchanges) - len(done),
        healed,
        sum(exchange.reused_tokens or 0 for exchange in done) / max(1, prompt_tokens),
    )


def figures(values: Iterable[float]) -> dict[str, float]:
    """Percentiles by name."""
    array = np.fromiter(values, np.float64)
    found = np.percentile(array, _PERCENTILES) if len(array) else [float("nan")] * len(_PERCENTILES)
    return {f"p{p}": round(float(value), 3) for p, value in zip(_PERCENTILES, found, strict=True)}


def compared(runs: Sequence[Run]) -> list[dict[str, object]]:
    """A row per setting; ratios to `off` pooled, and round by round: their median and their range."""
    rows: list[dict[str, object]] = []
    base = [run for run in runs if run.mode == "off"]
    for mode in MODES:
        own = [run for run in runs if run.mode == mode]
        row: dict[str, object] = {
            "heal": mode,
            "requests": sum(len(run.ttft_ms) for run in own),
            "failures": sum(run.failures for run in own),
            "healed_tokens": sum(run.healed_tokens for run in own),
            "reused_share": round(statistics.mean(run.reused_share for run in own), 3),
        }
        for name in ("ttft_ms", "gaps_ms"):
            mine, theirs = (figures(value for run in side for value in getattr(run, name)) for side in (own, base))
            by_round = [
                figures(getattr(a, name))["p95"] / figures(getattr(b, name))["p95"]
                for a, b in zip(own, base, strict=True)
            ]
            row |= {
                name: mine,
                f"{name}_over_off": {p: round(mine[p] / theirs[p], 3) for p in mine},
                f"{name}_p95_over_off_by_round": [round(ratio, 3) for ratio in by_round],
            }
        rows.append(row)
    return rows


def main() -> int:
    """Measure and print JSON; exit code 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", nargs="?", default="builtin:rag", help="request pack, as for kvgraft bench serve")
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--load", type=float, default=0.5, help="share of the measured capacity that is offered")
    parser.add_argument("--rate", type=float, help="requests per second, instead of measuring the capacity")
    parser.add_argument("--requests", type=int, default=120, help="per run")
    parser.add_argument("--warmup", type=int, default=24, help="requests before each run that are not measured")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-slots", type=int, default=16_000)
    parser.add_argument("--server-args", default="", help="further options of kvgraft serve")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end_on_sigterm()
    load = Load(args)
    capacity = None if args.rate else load.capacity()
    rate = args.rate or args.load * (capacity or 0.0)
    rng = random.Random(args.seed)
    runs: list[Run] = []
    for number in range(args.rounds):
        for mode in rng.sample(MODES, len(MODES)):
            runs.append(load.run(mode, rate))
            print(f"round {number + 1}: {mode}, {figures(runs[-1].ttft_ms)}", file=sys.stderr, flush=True)
    rows = compared(runs)
    print(json.dumps({"settings": vars(args), "capacity": capacity, "rate": rate, "rows": rows}, indent=1))
    return 1 if any(run.failures for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
