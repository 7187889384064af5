"""Replicas behind `kvgraft router`: reuse and time to first token by policy, and the cost of a replica that dies.

    python benchmarks/record.py routing-rag -- python benchmarks/routing.py ../shared/data/dev/rag --requests 120 \
        --dynamo .venv-dynamo/bin/python
    python benchmarks/record.py routing-vllm -- python benchmarks/routing.py ../shared/data/dev/rag --engine vllm \
        --model DIRECTORY --requests 24 --concurrency 1 --policies one,round_robin,prefix_hash,reuse

Two `kvgraft serve` on this machine, or two vLLM servers, answer the same requests, in the same order and from empty caches,
once per policy: `one` is a single replica without a router, `dynamo` sends a request where Dynamo's selection service says,
reading the same events; `reuse@SRC` is policy `reuse` of another version, with its sources in SRC. With `--share` replicas
share a directory of donors. With `--kill` one replica is ended with SIGKILL in the middle of one of its streams, among
requests that reuse exact prefixes only, so that every answer can be compared with a full prefill's. `choices` counts per
request which replica answered; with `--held` also the tokens of the prompt that each one held by its events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from kvgraft.bench.client import now
from kvgraft.bench.serve_workload import load_workload
from kvgraft.bench.server_process import ServerProcess
from kvgraft.router import Router, parse_worker
from kvgraft.router.prompts import COMPLETION_PATH, PromptReader, load_tokenizer
from replicas import PAGE, PATIENCE_S, Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Target = Callable[[list[int]], str]

POLICIES = ("one", "round_robin", "prefix_hash", "dynamo", "reuse")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request."""

    index: int
    worker: str
    ttft_ms: float
    prompt_tokens: int
    exact_tokens: int
    shifted_tokens: int
    text: str
    failure: str | None = None
    began: bool = False
    cached_tokens: int = 0
    held: tuple[tuple[int, int], ...] = ()


class Dynamo:
    """Dynamo's selection service in a process of its own."""

    def __init__(self, python: str, replicas: Replicas) -> None:
        script = Path(__file__).parent / "engines" / "dynamo_selection.py"
        endpoints = [replicas.events(number) for number in range(len(replicas.urls))]
        command = [python, str(script), "--block-size", str(PAGE), *endpoints]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(None)
        time.sleep(1.0)  # its subscriptions take effect; whether they have cannot be asked

    def select(self, token_ids: Sequence[int]) -> int:
        """The worker that it selects."""
        return int(self._ask({"token_ids": list(token_ids)})["worker"])

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, object] | None) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def router(replicas: Replicas, model: str, policy: str) -> Iterator[ServerProcess]:
    """A router before the replicas."""
    workers = [part for number in range(len(replicas.urls)) for part in ("--worker", replicas.worker(number))]
    name, _, source = policy.partition("@")
    environ = {"PYTHONPATH": source} if source else None
    with ServerProcess([*workers, "--model", model, "--policy", name], environ, command="router") as process:
        yield process


@dataclass(frozen=True, slots=True)
class Stream:
    """How requests are sent.

    Attributes:
        target: Where a prompt goes.
        fields: What request `index` says besides its prompt.
        concurrency: Requests at the same time.
        on_first: Receives each first token: its replica, and how many requests are done.
        held: What each replica holds of a prompt, exact and shifted.
    """

    target: Target
    fields: Callable[[int], dict[str, object]]
    concurrency: int = 1
    on_first: Callable[[str, int], None] = lambda *_: None
    held: Callable[[list[int]], tuple[tuple[int, int], ...]] = lambda _: ()

    async def play(self, prompts: Sequence[list[int]]) -> list[Outcome]:
        """Ask everything in order."""
        waiting = iter(enumerate(prompts))
        outcomes: list[Outcome] = []
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def client() -> None:
                for index, prompt in waiting:
                    held = await asyncio.to_thread(self.held, prompt)
                    url = await asyncio.to_thread(self.target, prompt)
                    request = {"prompt": prompt, **self.fields(index)}
                    first = lambda worker: self.on_first(worker, len(outcomes))  # noqa: E731
                    outcomes.append(replace(await ask(session, url, index, request, first), held=held))

            await asyncio.gather(*(client() for _ in range(self.concurrency)))
        return sorted(outcomes, key=lambda outcome: outcome.index)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    index: int,
    request: dict[str, Any],
    on_first: Callable[[str], None],
) -> Outcome:
    """Stream one answer."""
    num_tokens = len(request["prompt"])
    started, first, last, usage, text = now(), 0.0, {}, {}, ""
    worker, failure = "", None
    body = {"stream": True, "temperature": 0, "ignore_eos": True, **request}
    body["stream_options"] = {"include_usage": True}
    try:
        async with session.post(url + COMPLETION_PATH, json=body) as response:
            worker = response.headers.get("x-kvgraft-worker", url)
            if response.status != 200:
                return Outcome(index, worker, 0.0, num_tokens, 0, 0, "", f"http {response.status}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    failure = event["error"]["code"]
                    break
                if not first:
                    first = now()
                    on_first(worker)
                text += "".join(choice["text"] for choice in event["choices"])
                last = event.get("kvgraft") or last
                usage = event.get("usage") or usage
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        failure = type(error).__name__
    return Outcome(
        index,
        worker,
        1e3 * (first - started),
        num_tokens,
        int(last.get("exact_tokens", 0)),
        int(last.get("shifted_tokens", 0)),
        text,
        failure,
        began=bool(first),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
    )


def summary(
    policy: str, outcomes: Sequence[Outcome], names: Sequence[str] = (), reused: dict[str, float] | None = None
) -> dict[str, object]:
    """Sum one policy up.

    Args:
        policy: Its name.
        outcomes: Of all requests.
        names: Of the replicas, in order.
        reused: Exact and shifted tokens where the answers do not tell them.
    """
    done = [outcome for outcome in outcomes if outcome.failure is None]
    total = sum(outcome.prompt_tokens for outcome in done)
    times = sorted(outcome.ttft_ms for outcome in done)
    if reused is None:
        reused = {kind: sum(getattr(outcome, f"{kind}_tokens") for outcome in done) for kind in ("exact", "shifted")}
    share = {kind: round(100 * reused[kind] / total, 1) for kind in ("exact", "shifted")}
    row = {
        "policy": policy,
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "reused_percent": round(share["exact"] + share["shifted"], 1),
        "exact_percent": share["exact"],
        "shifted_percent": share["shifted"],
        "ttft_mean_ms": round(statistics.mean(times), 1),
        "ttft_median_ms": round(statistics.median(times), 1),
        "ttft_p95_ms": round(times[int(0.95 * (len(times) - 1))], 1),
        "by_worker": dict(sorted(Counter(outcome.worker for outcome in done).items())),
    }
    cached = sum(outcome.cached_tokens for outcome in done)
    row |= {"cached_percent": round(100 * cached / total, 1)} if cached else {}
    if names:
        row["choices"] = [names.index(outcome.worker) if outcome.worker in names else None for outcome in outcomes]
    if any(outcome.held for outcome in outcomes):
        row["held"] = [outcome.held for outcome in outcomes]
    return row


def watched(replicas: Replicas) -> Router:
    """Listens to the replicas' events and sends nothing."""
    return Router([parse_worker(replicas.worker(number)) for number in range(len(replicas.urls))])


def holdings(router: Router, prompt: list[int]) -> tuple[tuple[int, int], ...]:
    """What each replica holds of a prompt."""
    return tuple((score.exact_tokens, score.shifted_tokens) for score in router.score(prompt).values())


def compare(args: argparse.Namespace, replicas: Replicas, prompts: Sequence[list[int]]) -> list[dict[str, object]]:
    """Play the stream once per policy, from empty caches."""
    names = [replicas.name(number) for number in range(len(replicas.urls))]
    rows = []
    for policy in args.policies.split(","):
        if policy == "dynamo" and not args.dynamo:
            continue
        replicas.reset()
        with ExitStack() as stack:
            target = targeted(policy, args, replicas, stack)
            before = replicas.reused()
            stream = Stream(
                target, lambda i: {"max_tokens": args.tokens, **replicas.fields("graft", i)}, args.concurrency
            )
            if args.held:
                watch = watched(replicas)
                stack.callback(watch.close)
                time.sleep(1.0)  # its subscriptions take effect
                stream = replace(stream, held=lambda prompt, watch=watch: holdings(watch, prompt))
            outcomes = asyncio.run(stream.play(prompts))
            after = replicas.reused()
        reused = None if after is None or before is None else {kind: after[kind] - before[kind] for kind in after}
        named = [replace(outcome, worker=named_worker(outcome.worker, replicas)) for outcome in outcomes]
        rows.append(summary(policy, named, names, reused))
        print(f"{policy}: {rows[-1]['reused_percent']} %", file=sys.stderr)
    return rows


def named_worker(worker: str, replicas: Replicas) -> str:
    """The name of a replica that was asked without a router, by its URL."""
    return replicas.name(replicas.urls.index(worker)) if worker in replicas.urls else worker


def targeted(policy: str, args: argparse.Namespace, replicas: Replicas, stack: ExitStack) -> Target:
    """Return the chooser of replicas; it ends with the stack."""
    if policy == "one":
        return lambda _: replicas.urls[0]
    if policy == "dynamo":
        service = Dynamo(args.dynamo, replicas)
        stack.callback(service.close)
        replicas.reset()
        return lambda prompt: replicas.urls[service.select(prompt)]
    url = stack.enter_context(router(replicas, args.model, policy)).url
    return lambda _: url


def survive(args: argparse.Namespace, replicas: Replicas, prompts: Sequence[list[int]]) -> dict[str, object]:
    """Kill a replica amid one of its streams; compare every answer with a full prefill's."""

    def asked(reuse: str) -> Callable[[int], dict[str, object]]:
        return lambda index: {"max_tokens": args.tokens, **replicas.fields(reuse, index)}

    replicas.reset()
    truth = asyncio.run(Stream(lambda _: replicas.urls[0], asked("off")).play(prompts))
    replicas.reset()
    killed: list[int] = []

    def kill(worker: str, num_done: int) -> None:
        if num_done >= len(prompts) // 3 and worker == replicas.name(1) and not killed:
            killed.append(num_done)
            replicas.kill(1)

    with router(replicas, args.model, "reuse") as process:
        stream = Stream(lambda _: process.url, asked("exact"), max(4, args.concurrency), kill)
        outcomes = asyncio.run(stream.play(prompts))
        replicas.restart(1)
        time.sleep(3.0)  # the router asks every second
        again = asyncio.run(replace(stream, on_first=lambda *_: None).play(prompts[: len(prompts) // 3]))
        metrics = urllib.request.urlopen(process.url + "/metrics", timeout=PATIENCE_S).read().decode()
    pairs = list(zip(outcomes, truth, strict=True)) + list(zip(again, truth, strict=False))
    gaps = [line for line in metrics.splitlines() if line.startswith("kvgraft_router:event_gaps_total")]
    return {
        "requests": len(outcomes),
        "killed_behind": killed[0] if killed else None,
        "failed_streams_of_the_killed": sum(o.failure is not None and o.began for o in outcomes),
        "failed_otherwise": sum(
            o.failure is not None and not (o.began and o.worker == replicas.name(1)) for o in outcomes
        ),
        "retried": sum(
            float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("kvgraft_router:retries_total")
        ),
        "answers_compared": sum(o.failure is None for o, _ in pairs),
        "wrong_answers": sum(o.failure is None and o.text != t.text for o, t in pairs),
        "wrong_beginnings_of_streams_that_broke_off": sum(
            o.failure is not None and not t.text.startswith(o.text) for o, t in pairs
        ),
        "behind_the_restart": {"requests": len(again), "failed": sum(o.failure is not None for o in again)},
        "by_worker_behind_the_restart": dict(Counter(o.worker for o in again)),
        "event_gaps": gaps,
    }


def replicas_of(args: argparse.Namespace) -> Replicas:
    """The servers of the engine that is asked for; they are not started."""
    if args.engine == "kvgraft":
        return Replicas(args.model, args.replicas, args.port, args.server_args.split(), share=args.share)
    sys.path.insert(0, str(Path(__file__).parent / "engines"))
    from vllm_replicas import VLLMReplicas

    return VLLMReplicas(args.venv, args.model, args.replicas, args.port, share=args.share)


def main() -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", nargs="?", default="builtin:rag", help="request pack, as for kvgraft bench serve")
    parser.add_argument("--engine", choices=("kvgraft", "vllm"), default="kvgraft")
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="environment with vLLM and kvgraft")
    parser.add_argument("--model", default="graft-tiny", help="for vLLM a directory")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per answer")
    parser.add_argument("--concurrency", type=int, default=2, help="requests at the same time")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=17_400, help="first of three ports per replica")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--dynamo", help="Python with ai-dynamo-runtime; without it that policy is left out")
    parser.add_argument("--server-args", default="", help="further options of kvgraft serve")
    parser.add_argument("--share", action="store_true", help="the replicas share a store")
    parser.add_argument("--held", action="store_true", help="record what each replica held of each prompt")
    parser.add_argument("--kill", action="store_true", help="kill a replica amid the stream as well")
    args = parser.parse_args()
    reader = PromptReader(load_tokenizer(args.model))
    texts = load_workload(args.pack, args.requests, args.seed).prompts[: args.requests]
    prompts = [reader.tokens(COMPLETION_PATH, {"prompt": text}) for text in texts]
    token_ids = [[int(token) for token in prompt] for prompt in prompts if prompt is not None]
    replicas = replicas_of(args)
    try:
        replicas.start()
        rows = compare(args, replicas, token_ids) if args.policies else []
        death = survive(args, replicas, token_ids) if args.kill else None
    finally:
        replicas.stop()
    lengths = sorted(map(len, token_ids))
    settings = {key: value for key, value in vars(args).items() if key not in ("dynamo", "venv")}
    settings |= {"pack": Path(args.pack).name, "model": Path(args.model).name}
    facts = {"settings": settings, "median_prompt_tokens": lengths[len(lengths) // 2], "longest": lengths[-1]}
    print(json.dumps({**facts, "rows": rows, "killed": death}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
