"""Many short mixed requests against a server with too small a pool: nothing fails, leaks or grows; then kill -9 and restart.

    python benchmarks/soak.py --requests 10000

`--clients` clients send requests of every kind: streamed or not, under every reuse mode and several salts, over
overlapping texts; some are left in mid-stream, some before the first token, some are malformed. The pool holds a third of
what the clients need together. Prints one JSON object; exit code 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.client import (
    DONE,
    CompletionsClient,
    HTTPStatusError,
    TimedRequest,
    completion_body,
    has_text,
    note_usage,
    now,
)
from kvgraft.bench.serve_workload import load_workload
from kvgraft.bench.server_process import ServerProcess, end_on_sigterm, rss_bytes
from kvgraft.errors import KVGraftError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_LONGEST_OUTPUT = 16
_TYPICAL_TOKENS = 170
"""Prompt and output of a request with `graft-tiny`'s tokenizer, on average; the longest have 450."""
_CHARACTERS = (40, 1_200)
_HEALTH_SECONDS = 1.0
_IDLE_SECONDS = 30.0
_STALL_SECONDS = 120.0
_MB = 1 << 20
_KINDS = {"stream": 42, "whole": 40, "leave in mid-stream": 7, "leave before first token": 6, "malformed": 5}
_MALFORMED: tuple[dict[str, object], ...] = (
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"temperature": -1},
    {"temperature": "hot"},
    {"prompt": None},
    {"prompt": [1, -5, 3]},
    {"prompt": [10_000_000]},
    {"prompt": {"text": "x"}},
    {"kvgraft": {"reuse": "everything"}},
    {"model": "no-such-model"},
    {"stream": "yes"},
)


@dataclass(slots=True)
class Findings:
    """What was seen: requests by kind, what went wrong (first of each sort), health and memory over time."""

    done: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    reused_tokens: int = 0
    prompt_tokens: int = 0
    health_checks: int = 0
    rss: list[tuple[int, int]] = field(default_factory=list)
    """Requests done so far, and resident bytes."""

    @property
    def total(self) -> int:
        """Requests that ended in any way."""
        return self.done.total()


class Soak:
    """The clients of one server.

    Args:
        client: Connection to it.
        seed: Of everything that is drawn.
        findings: What is written into.
    """

    def __init__(self, client: CompletionsClient, seed: int, findings: Findings) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._texts = load_workload("builtin:rag", 60, seed).prompts
        self._findings = findings

    async def run(self, requests: int, clients: int) -> None:
        """Send the requests and wait for all of them."""
        left = iter(range(requests))

        async def work() -> None:
            for _ in left:
                (kind,) = self._rng.choices(list(_KINDS), list(_KINDS.values()))
                try:
                    await asyncio.wait_for(self._one(kind), _STALL_SECONDS)
                except TimeoutError:
                    self._findings.problems[f"{kind}: no end after {_STALL_SECONDS:.0f} s"] += 1
                except Exception as error:  # noqa: BLE001 - any error is a finding
                    self._findings.problems[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1
                self._findings.done[kind] += 1

        await asyncio.gather(*(work() for _ in range(clients)))

    async def _one(self, kind: str) -> None:
        if kind == "malformed":
            await self._malformed()
        elif kind == "whole":
            await self._whole()
        elif kind == "stream":
            await self._stream()
        elif kind == "leave in mid-stream":
            await self._leave()
        else:
            await self._cancel()

    async def _malformed(self) -> None:
        wrong = self._rng.choice(_MALFORMED)
        body = self._body({"stream": self._rng.random() < 0.5} | wrong)
        if self._rng.random() < 0.2:
            wrong, body = {"body": "cut in half"}, body[: len(body) // 2]
        status, content = await self._client.post(body)
        if not 400 <= status < 500:
            self._problem(f"malformed: status {status} for {wrong}")
        elif not isinstance(json.loads(content).get("error"), dict):
            self._problem(f"malformed: no error object for {wrong}")

    async def _whole(self) -> None:
        exchange = TimedRequest(0.0)
        body, wanted = self._exact_body(stream=False)
        status, content = await self._client.post(body)
        if status != 200:
            self._problem(f"whole: status {status}: {content[:120]!r}")
            return
        note_usage(json.loads(content), exchange)
        self._count("whole", exchange, wanted)

    async def _stream(self) -> None:
        exchange = TimedRequest(now())
        body, wanted = self._exact_body(stream=True)
        await self._client.stream(body, exchange)
        if exchange.failure:
            self._problem(f"stream: {exchange.failure}")
        else:
            self._count("stream", exchange, wanted)

    async def _leave(self) -> None:
        chunks = self._rng.randint(1, 4)
        try:
            events = self._client.events(self._body({"stream": True}))
            async for data in events:
                chunks -= data != DONE and has_text(json.loads(data))
                if chunks <= 0:
                    break
            await events.aclose()
        except HTTPStatusError as error:
            self._problem(f"leave in mid-stream: {error}")

    async def _cancel(self) -> None:
        task = asyncio.ensure_future(self._client.post(self._body({"stream": self._rng.random() < 0.5})))
        await asyncio.sleep(self._rng.choice((0.0, 0.003, 0.03, 0.1, 0.3)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _exact_body(self, *, stream: bool) -> tuple[bytes, int]:
        wanted = self._rng.randint(1, _LONGEST_OUTPUT)
        return self._body({"stream": stream, "max_tokens": wanted}), wanted

    def _body(self, fields: dict[str, object]) -> bytes:
        rng = self._rng
        text = rng.choice(self._texts)
        start = rng.randrange(max(1, len(text) - _CHARACTERS[0]))
        prompt = f"{rng.choice('ABCDEF')} {text[start : start + rng.randint(*_CHARACTERS)]}"
        return completion_body(
            prompt,
            model=self._model,
            max_tokens=_LONGEST_OUTPUT,
            reuse=rng.choice(("off", "exact", "graft", "graft")),
            cache_salt=rng.choice((None, None, "tenant-a", "tenant-b")),
            stream=bool(fields["stream"]),
            others={"temperature": rng.choice((0, 0, 0.7))} | fields,
        )

    async def prepare(self) -> None:
        """Learn the model's name."""
        self._model = str((await self._client.get_json("/v1/models"))["data"][0]["id"])

    def _count(self, kind: str, exchange: TimedRequest, wanted: int) -> None:
        self._findings.prompt_tokens += exchange.prompt_tokens
        self._findings.reused_tokens += exchange.reused_tokens or 0
        if exchange.completion_tokens != wanted:
            self._problem(f"{kind}: another number of tokens than asked for")

    def _problem(self, text: str) -> None:
        self._findings.problems[text] += 1


async def watch(client: CompletionsClient, pid: int, findings: Findings, total: int) -> None:
    """Look at health and memory until cancelled, and say how far it is."""
    start = time.perf_counter()
    while True:
        await asyncio.sleep(_HEALTH_SECONDS)
        try:
            problem = health_problem(await client.get_json("/health"))
        except KVGraftError as error:
            problem = f"health: {error}"
        if problem:
            findings.problems[problem[:200]] += 1
        findings.health_checks += 1
        findings.rss.append((findings.total, rss_bytes(pid)))
        rate = findings.total / (time.perf_counter() - start)
        text = f"{findings.total:,} of {total:,} requests, {rate:.0f}/s, RSS {findings.rss[-1][1] / _MB:.0f} MB"
        is_terminal = sys.stderr.isatty()
        if is_terminal or findings.health_checks % 10 == 0:
            print(f"\r{text}   " if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


def health_problem(health: dict[str, object]) -> str | None:
    """Say what is wrong, or None; every slot must be in exactly one hand."""
    slots = health.get("slots")
    if health.get("status") != "ok" or health.get("invariant") != "ok":
        return f"health: status {health.get('status')}, invariant {health.get('invariant')}"
    if (
        not isinstance(slots, dict)
        or sum(slots[name] for name in ("free", "request", "cached", "donor")) != slots["total"]
    ):
        return f"health: slots do not add up: {slots}"
    return None


async def wait_until_idle(client: CompletionsClient) -> str | None:
    """Wait until no request holds a slot; says what is wrong if that does not happen."""
    deadline = time.perf_counter() + _IDLE_SECONDS
    while True:
        health = await client.get_json("/health")
        held, requests = health["slots"]["request"], health["requests"]
        if not held and not requests["running"] and not requests["waiting"]:
            return health_problem(health)
        if time.perf_counter() > deadline:
            return f"leak: {held} slots held by requests, {requests} {_IDLE_SECONDS:.0f} s after the last one"
        await asyncio.sleep(0.2)


def memory(samples: list[tuple[int, int]], tolerance_mb: float) -> tuple[dict[str, float], str | None]:
    """Fit the growth of resident memory over the second half of the requests; says if it is above the tolerance."""
    if len(samples) < 8 or not samples[-1][1]:
        return {}, None
    half = [(done, size / _MB) for done, size in samples if done >= samples[-1][0] / 2]
    done, size = np.array(half).T
    span = float(done[-1] - done[0])
    growth = float(np.polyfit(done, size, 1)[0]) * span if span else 0.0
    figures = {
        "start_mb": samples[0][1] / _MB,
        "middle_mb": float(size[0]),
        "end_mb": float(size[-1]),
        "growth_second_half_mb": growth,
        "tolerance_mb": tolerance_mb,
    }
    problem = f"memory: grew by {growth:.0f} MB over the second half of the requests" if growth > tolerance_mb else None
    return figures, problem


async def main_phase(server: ServerProcess, args: argparse.Namespace, findings: Findings) -> None:
    """Send all requests and see that nothing is left."""
    async with CompletionsClient(server.url) as client:
        soak = Soak(client, args.seed, findings)
        await soak.prepare()
        watcher = asyncio.ensure_future(watch(client, server.pid, findings, args.requests))
        await soak.run(args.requests, args.clients)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        problem = await wait_until_idle(client)
        if problem:
            findings.problems[problem] += 1


async def kill_phase(server: ServerProcess, args: argparse.Namespace) -> int:
    """End the server with SIGKILL while requests run; returns how many were cut off. No client may hang."""
    findings = Findings()
    async with CompletionsClient(server.url) as client:
        soak = Soak(client, args.seed + 1, findings)
        await soak.prepare()
        load = asyncio.ensure_future(soak.run(20 * args.clients, args.clients))
        while findings.total < args.clients and not load.done():
            await asyncio.sleep(0.05)
        server.kill()
        await asyncio.wait_for(load, _STALL_SECONDS)
    return findings.problems.total()


async def restart_phase(server: ServerProcess, args: argparse.Namespace, findings: Findings) -> None:
    """See that the server that took the killed one's place is empty and serves."""
    async with CompletionsClient(server.url) as client:
        health = await client.get_json("/health")
        if health["slots"]["free"] != health["slots"]["total"] or health["donors"]:
            findings.problems["restart: the new server is not empty"] += 1
        soak = Soak(client, args.seed + 2, findings)
        await soak.prepare()
        await soak.run(min(args.requests, 200), args.clients)
        problem = await wait_until_idle(client)
        if problem:
            findings.problems[f"restart: {problem}"] += 1


def phase(work: Callable[[], Awaitable[object]], name: str, findings: Findings) -> object:
    """Run a phase; an error of it becomes a finding."""
    print(f"\n{name}", file=sys.stderr, flush=True)

    async def run() -> object:
        return await work()

    try:
        return asyncio.run(run())
    except (KVGraftError, TimeoutError, OSError, LookupError) as error:
        findings.problems[f"{name}: {type(error).__name__}: {error}"[:200]] += 1
        return None


def main() -> int:
    """Run all phases, print the summary."""
    args = _parse()
    end_on_sigterm()
    start = time.perf_counter()
    num_slots = args.num_slots or args.clients * _TYPICAL_TOKENS // 3
    environ = {
        "KVGRAFT_NUM_SLOTS": str(num_slots),
        "KVGRAFT_HOST_BYTES": str(64 * _MB),
        "KVGRAFT_DONOR_TOKENS": "200000",
    }
    findings, after = Findings(), Findings()
    cut_off = 0
    port = free_port()
    arguments = ["--model", args.model]
    try:
        with ServerProcess(arguments, environ, port) as server:
            phase(lambda: main_phase(server, args, findings), "mixed requests", findings)
            if server.returncode is not None:
                findings.problems[f"the server ended with code {server.returncode}"] += 1
            else:
                cut_off = phase(lambda: kill_phase(server, args), "kill -9 under load", findings) or 0
        with ServerProcess(arguments, environ, port) as server:
            phase(lambda: restart_phase(server, args, after), "restart on the same port", after)
    except KVGraftError as error:
        findings.problems[str(error)] += 1
    figures, problem = memory(findings.rss, args.tolerance_mb)
    if problem:
        findings.problems[problem] += 1
    problems = findings.problems + after.problems
    print(
        json.dumps(
            {
                "passed": not problems,
                "problems": dict(problems),
                "requests": dict(findings.done),
                "clients": args.clients,
                "num_slots": num_slots,
                "seconds": time.perf_counter() - start,
                "reused_share": findings.reused_tokens / max(findings.prompt_tokens, 1),
                "health_checks": findings.health_checks,
                "memory": figures,
                "cut_off_by_kill": cut_off,
                "served_after_restart": after.total,
            },
            indent=1,
        )
    )
    return int(bool(problems))


def free_port() -> int:
    """Return a port that was free a moment ago; a restart has to take the very same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--num-slots", type=int, default=0, help="default: a third of what the clients need")
    parser.add_argument("--tolerance-mb", type=float, default=24.0, help="growth of memory over the second half")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
