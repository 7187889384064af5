"""How running streams fare over HTTP while long prompts arrive, and how decoding scales with the number of streams.

    python benchmarks/bench_streams.py --json

Slow-down: `--streams` long streams run; a window of `--window` seconds alone and one in which a cold prompt of
`--prefill-tokens` random tokens arrives every `--every` seconds take turns, the first one changing from round to round.
Prompts without a first token when the window ends are cut off and counted. Scaling: one stream and `--streams` streams take
turns. Medians over rounds. A gap is the time between two chunks of a stream; a chunk is a token, except where a character
needs several.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

from kvgraft.bench.client import CompletionsClient, Exchange, completion_body
from kvgraft.bench.server_process import ServerProcess, end_on_sigterm
from kvgraft.errors import KVGraftError

_STREAM_PROMPT_TOKENS = 32
_PAUSE_SECONDS = 0.3
_FIRST_TEXT_ID = 3


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """Streams within a window: mean over streams of their mean gap, and the p95 over all gaps; milliseconds."""

    tpot_ms: float
    gap_p95_ms: float


@dataclass(frozen=True, slots=True)
class SlowDownRound:
    """One round; `prefill_ttft_ms` of the prompts that had a first token, `cut_off` of them had none within the window."""

    alone: WindowFigures
    loaded: WindowFigures
    prefill_ttft_ms: list[float]
    cut_off: int


@dataclass(frozen=True, slots=True)
class ScalingRound:
    """Output tokens per second of one stream and of all streams together."""

    one: float
    many: float


class StreamBench:
    """The measurements against one server."""

    def __init__(self, client: CompletionsClient, model: str, args: argparse.Namespace) -> None:
        self._client = client
        self._model = model
        self._args = args
        self._rng = random.Random(args.seed)

    async def slow_down(self, number: int) -> SlowDownRound:
        """Run the streams, and in one of two windows prompts beside them."""
        prompts = [self._tokens(_STREAM_PROMPT_TOKENS) for _ in range(self._args.streams)]
        exchanges, tasks = self._start([self._body(prompt, self._args.stream_tokens) for prompt in prompts])
        windows: dict[str, WindowFigures] = {}
        prefills: list[Exchange] = []
        try:
            await _first_tokens(exchanges, tasks)
            for kind in ("alone", "loaded") if number % 2 == 0 else ("loaded", "alone"):
                await asyncio.sleep(_PAUSE_SECONDS)
                start = time.perf_counter()
                if kind == "loaded":
                    prefills = await self._prefills()
                else:
                    await asyncio.sleep(self._args.window)
                windows[kind] = _window_figures(exchanges, start, start + self._args.window)
            if any(task.done() for task in tasks):
                failures = {exchange.failure for exchange in exchanges if exchange.failure}
                raise SystemExit(f"streams ended within the round ({failures or 'too short'}); raise --stream-tokens")
        finally:
            await _cancel(tasks)
        ttft_ms = [1e3 * exchange.ttft_s for exchange in prefills if exchange.ttft_s is not None]
        return SlowDownRound(windows["alone"], windows["loaded"], ttft_ms, len(prefills) - len(ttft_ms))

    async def scaling(self) -> ScalingRound:
        """Run one stream, then all, to their ends."""
        return ScalingRound(await self._rate(1), await self._rate(self._args.streams))

    async def _rate(self, streams: int) -> float:
        """Output tokens per second behind each stream's first token, summed over streams."""
        bodies = [self._body(self._tokens(_STREAM_PROMPT_TOKENS), self._args.scaling_tokens) for _ in range(streams)]
        exchanges, tasks = self._start(bodies)
        await asyncio.gather(*tasks)
        rates = []
        for exchange in exchanges:
            if exchange.tpot_s is None:
                raise SystemExit(f"a stream failed: {exchange.failure or 'it gave one token only'}")
            rates.append(1 / exchange.tpot_s)
        return sum(rates)

    async def _prefills(self) -> list[Exchange]:
        """Send cold prompts for the length of the window."""
        exchanges, tasks = [], []
        end = time.perf_counter() + self._args.window
        while (left := end - time.perf_counter()) > 0:
            more, sent = self._start([self._body(self._tokens(self._args.prefill_tokens), 1)])
            exchanges += more
            tasks += sent
            await asyncio.sleep(min(left, self._args.every))
        await _cancel(tasks)
        failures = [exchange.failure for exchange in exchanges if exchange.ended_s and exchange.failure]
        if failures:
            raise SystemExit(f"a prompt failed: {failures[0]}")
        return exchanges

    def _start(self, bodies: list[bytes]) -> tuple[list[Exchange], list[asyncio.Task[None]]]:
        exchanges = [Exchange(time.perf_counter()) for _ in bodies]
        pairs = zip(bodies, exchanges, strict=True)
        return exchanges, [asyncio.ensure_future(self._client.stream(body, exchange)) for body, exchange in pairs]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(_FIRST_TEXT_ID, self._args.vocab) for _ in range(count)]

    def _body(self, prompt: list[int], max_tokens: int) -> bytes:
        return completion_body(prompt, model=self._model, max_tokens=max_tokens, reuse=self._args.reuse)


async def _first_tokens(exchanges: list[Exchange], tasks: list[asyncio.Task[None]]) -> None:
    while not all(exchange.token_s for exchange in exchanges):
        if any(task.done() for task in tasks):
            return
        await asyncio.sleep(0.01)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _window_figures(exchanges: list[Exchange], start: float, end: float) -> WindowFigures:
    gaps = [np.diff([moment for moment in exchange.token_s if start <= moment <= end]) for exchange in exchanges]
    if any(not len(gap) for gap in gaps):
        raise SystemExit("a stream stood still for a whole window; lengthen --window")
    return WindowFigures(
        1e3 * statistics.mean(float(gap.mean()) for gap in gaps), 1e3 * float(np.percentile(np.concatenate(gaps), 95))
    )


def summarise(slow: list[SlowDownRound], scaling: list[ScalingRound]) -> dict[str, object]:
    """Return medians over rounds; ratios are taken within a round."""
    summary: dict[str, object] = {}
    if slow:
        ttft_ms = [t for r in slow for t in r.prefill_ttft_ms]
        summary |= {
            "tpot_alone_ms": statistics.median(r.alone.tpot_ms for r in slow),
            "tpot_loaded_ms": statistics.median(r.loaded.tpot_ms for r in slow),
            "tpot_degradation": statistics.median(r.loaded.tpot_ms / r.alone.tpot_ms for r in slow) - 1,
            "gap_p95_alone_ms": statistics.median(r.alone.gap_p95_ms for r in slow),
            "gap_p95_loaded_ms": statistics.median(r.loaded.gap_p95_ms for r in slow),
            "gap_p95_degradation": statistics.median(r.loaded.gap_p95_ms / r.alone.gap_p95_ms for r in slow) - 1,
            "prefill_ttft_p50_ms": statistics.median(ttft_ms) if ttft_ms else None,
            "prefill_ttft_max_ms": max(ttft_ms, default=None),
            "prefills_answered": len(ttft_ms),
            "prefills_cut_off": sum(r.cut_off for r in slow),
        }
    if scaling:
        summary |= {
            "tokens_per_s_one": statistics.median(r.one for r in scaling),
            "tokens_per_s_many": statistics.median(r.many for r in scaling),
            "scaling": statistics.median(r.many / r.one for r in scaling),
        }
    return summary


async def measure(url: str, args: argparse.Namespace) -> dict[str, object]:
    """Run all rounds."""
    slow, scaling = [], []
    async with CompletionsClient(url) as client:
        model = str((await client.get_json("/v1/models"))["data"][0]["id"])
        bench = StreamBench(client, model, args)
        await bench.scaling()  # warms up
        for number in range(args.rounds):
            if args.only != "scaling":
                slow.append(await bench.slow_down(number))
            if args.only != "slow-down":
                scaling.append(await bench.scaling())
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    rounds = {"slow_down": [asdict(r) for r in slow], "scaling": [asdict(r) for r in scaling]}
    return {"settings": vars(args), "model": model, "summary": summarise(slow, scaling), "rounds": rounds}


def main() -> int:
    """Measure and print."""
    args = _parse()
    end_on_sigterm()
    server = contextlib.nullcontext(None) if args.url else ServerProcess(shlex.split(args.server_args))
    try:
        with server as started:
            result = asyncio.run(measure(args.url or started.url, args))
    except KVGraftError as error:
        print(f"bench_streams: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result["summary"].items():
            shown = "none" if value is None else f"{value:.1%}" if name.endswith("degradation") else f"{value:.2f}"
            print(f"{name:24s}{shown:>12s}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server (default: one is started)")
    parser.add_argument("--server-args", default="--model graft-tiny", help="arguments of kvgraft serve")
    parser.add_argument("--only", choices=("slow-down", "scaling"))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=8.0, help="seconds")
    parser.add_argument("--prefill-tokens", type=int, default=4096)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between prompts")
    parser.add_argument("--stream-tokens", type=int, default=8000, help="longest output of a stream beside prompts")
    parser.add_argument("--scaling-tokens", type=int, default=128)
    parser.add_argument("--reuse", choices=("off", "exact", "graft"), default="off")
    parser.add_argument("--vocab", type=int, default=4000, help="random token ids are below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
