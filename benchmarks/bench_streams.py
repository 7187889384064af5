"""How running streams fare over HTTP while long prompts arrive, and how decoding scales with the number of streams.

    python benchmarks/bench_streams.py --json

Slow-down: `--streams` streams of `--stream-tokens` tokens run to their ends, alone and while a cold prompt of
`--prefill-tokens`
random tokens arrives every `--every` seconds, the order changing from round to round. Both sides decode the same lengths,
because a step takes longer the longer its sequences are. Prompts without a first token when the streams end are cut off
and counted. Scaling: one stream and `--streams` streams take turns. Medians over rounds. A gap is the time between two
chunks of a stream; a chunk is a token, except where a character needs several.
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
from dataclasses import asdict, dataclass

import numpy as np

from kvgraft.bench.client import CompletionsClient, TimedRequest, completion_body, now
from kvgraft.bench.server_process import ServerProcess, end_on_sigterm
from kvgraft.errors import KVGraftError

_STREAM_PROMPT_TOKENS = 32
_SKIPPED_GAPS = 20
_FIRST_TEXT_ID = 3


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Mean over streams of their mean gap, and the p95 over all gaps; milliseconds."""

    tpot_ms: float
    gap_p95_ms: float


@dataclass(frozen=True, slots=True)
class SlowDownRound:
    """One round; prompts with a first token, and how many had none when the streams ended."""

    alone: StreamFigures
    loaded: StreamFigures
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
        """Run the streams to their ends twice, once with prompts beside them."""
        figures: dict[str, StreamFigures] = {}
        prefills: list[TimedRequest] = []
        for kind in ("alone", "loaded") if number % 2 == 0 else ("loaded", "alone"):
            bodies = [
                self._body(self._tokens(_STREAM_PROMPT_TOKENS), self._args.stream_tokens)
                for _ in range(self._args.streams)
            ]
            exchanges, tasks = self._start(bodies)
            await _first_tokens(exchanges, tasks)
            sender = asyncio.ensure_future(self._prefills(prefills)) if kind == "loaded" else None
            await asyncio.gather(*tasks)
            if sender is not None:
                await _cancel([sender])
            figures[kind] = _stream_figures(exchanges)
        failures = [exchange.failure for exchange in prefills if exchange.failure and exchange.failure != "cancelled"]
        if failures:
            raise SystemExit(f"a prompt failed: {failures[0]}")
        ttft_ms = [1e3 * exchange.ttft_s for exchange in prefills if exchange.ttft_s is not None]
        return SlowDownRound(figures["alone"], figures["loaded"], ttft_ms, len(prefills) - len(ttft_ms))

    async def scaling(self) -> ScalingRound:
        """Run one stream, then all, to their ends."""
        return ScalingRound(await self._rate(1), await self._rate(self._args.streams))

    async def _rate(self, streams: int) -> float:
        """Output tokens per second after each stream's first token, summed over streams."""
        bodies = [self._body(self._tokens(_STREAM_PROMPT_TOKENS), self._args.scaling_tokens) for _ in range(streams)]
        exchanges, tasks = self._start(bodies)
        await asyncio.gather(*tasks)
        rates = []
        for exchange in exchanges:
            if exchange.tpot_s is None:
                raise SystemExit(f"a stream failed: {exchange.failure or 'it gave one token only'}")
            rates.append(1 / exchange.tpot_s)
        return sum(rates)

    async def _prefills(self, exchanges: list[TimedRequest]) -> None:
        """Send cold prompts, noting them in `exchanges`, until cancelled; what is unanswered then is cancelled too."""
        tasks: list[asyncio.Task[None]] = []
        try:
            while True:
                more, sent = self._start([self._body(self._tokens(self._args.prefill_tokens), 1)])
                exchanges += more
                tasks += sent
                await asyncio.sleep(self._args.every)
        finally:
            await _cancel(tasks)

    def _start(self, bodies: list[bytes]) -> tuple[list[TimedRequest], list[asyncio.Task[None]]]:
        exchanges = [TimedRequest(now()) for _ in bodies]
        pairs = zip(bodies, exchanges, strict=True)
        return exchanges, [asyncio.ensure_future(self._client.stream(body, exchange)) for body, exchange in pairs]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(_FIRST_TEXT_ID, self._args.vocab) for _ in range(count)]

    def _body(self, prompt: list[int], max_tokens: int) -> bytes:
        return completion_body(prompt, model=self._model, max_tokens=max_tokens, reuse=self._args.reuse)


async def _first_tokens(exchanges: list[TimedRequest], tasks: list[asyncio.Task[None]]) -> None:
    while not all(exchange.token_s for exchange in exchanges):
        if any(task.done() for task in tasks):
            return
        await asyncio.sleep(0.01)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _stream_figures(exchanges: list[TimedRequest]) -> StreamFigures:
    failed = next((exchange.failure for exchange in exchanges if exchange.failure), None)
    if failed is not None:
        raise SystemExit(f"a stream failed: {failed}")
    # The first gaps are those in which the other streams' prompts are computed.
    gaps = [np.diff(exchange.token_s)[_SKIPPED_GAPS:] for exchange in exchanges]
    return StreamFigures(
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
    parser.add_argument("--prefill-tokens", type=int, default=4096)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between prompts")
    parser.add_argument("--stream-tokens", type=int, default=1000, help="output of each stream")
    parser.add_argument("--scaling-tokens", type=int, default=128)
    parser.add_argument("--reuse", choices=("off", "exact", "graft"), default="off")
    parser.add_argument("--vocab", type=int, default=4000, help="random token ids are below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
