"""When the tokens of an answer come: repaired before the first one or after it, beside off and an exact hit, in each engine.

    .venv/bin/python benchmarks/engines/answers.py --model DIR --engines vLLM SGLang --tokens 600 4000

One server per engine, with kvgraft. A round has a new document, read after one head; then it is asked for after another
head and before a new question, in turns computed in full (`off`) and grafted with the policy's choice computed `before` and
`after` the first token, and `exact` is the head and document again with as many new tokens after them. Answers are streamed.
Per kind: medians over rounds in milliseconds, and the ratios of medians to `exact` and `off` with bootstrapped 95 %
intervals. JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rounds import ratio_of_medians, tokens
from suite_servers import ENGINES, EngineServer, Site
from vllm_server import HOST, MODEL_NAME, ServerError, package_versions, stream_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = ("off", "exact", "before", "after")
HEAD, NEW_HEAD, QUESTION, NUM_TOKENS = 50, 150, 100, 8
_REST_S = 0.4
"""After an answer: what the server stores, and heals, is in no figure."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds from the question to the first token, from it to the second, and to the last."""

    first: float
    second: float
    total: float


def completion(options: dict[str, object]) -> Callable[[list[int]], tuple[str, dict[str, object]]]:
    """Return how a streamed completion with these fields is asked for."""

    def body(prompt: list[int]) -> tuple[str, dict[str, object]]:
        common = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        return "/v1/completions", common | {"stream": True} | options

    return body


def generate(options: dict[str, object]) -> Callable[[list[int]], tuple[str, dict[str, object]]]:
    """Return how SGLang is asked; `options` are its custom parameters."""

    def body(prompt: list[int]) -> tuple[str, dict[str, object]]:
        sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "custom_params": options}
        return "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    return body


def asked(engine: str, kind: str) -> Callable[[list[int]], tuple[str, dict[str, object]]]:
    """Return how a kind of request is written for an engine."""
    mode, repair = {"off": "off", "exact": "exact"}.get(kind, "graft"), kind if kind in ("before", "after") else None
    if engine == "kvgraft serve":
        return completion({"kvgraft": {"reuse": mode} | ({"repair": repair} if repair else {})})
    parameters = {"kvgraft": mode} | ({"kvgraft_repair": repair} if repair else {})
    return generate(parameters) if engine == "SGLang" else completion({"kv_transfer_params": parameters})


def ask(port: int, path: str, body: dict[str, object]) -> Timed:
    """Send a request and time the events of its stream."""
    connection = http.client.HTTPConnection(HOST, port, timeout=900)
    started = time.perf_counter()
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ServerError(f"status {response.status}: {response.read()[:2000].decode(errors='replace')}")
        times = [1e3 * (at - started) for at in token_times(response)]
    finally:
        connection.close()
    return Timed(times[0], times[1] - times[0], times[-1])


def token_times(lines: Iterator[bytes]) -> Iterator[float]:
    """Yield when each token came; events without one are left out."""
    seen = 0
    for event in stream_events(lines):
        count = len(event["output_ids"]) if "output_ids" in event else seen + bool(event.get("choices"))
        if count > seen and seen < NUM_TOKENS:
            yield time.perf_counter()
        seen = max(seen, count)


def measure(
    send: Callable[[str, list[int]], Timed], length: int, rounds: int, rng: np.random.Generator
) -> dict[str, list[Timed]]:
    """Return the times of every kind, by round, for documents of `length`; the first round warms up and is not kept."""
    new = partial(tokens, rng)
    found: dict[str, list[Timed]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        document = new(length)
        known = new(HEAD) + document
        send("exact", known + new(QUESTION))  # not `off`: vLLM keeps nothing of that as a donor
        for kind in rng.permutation(KINDS):
            moved = new(NEW_HEAD) + document + new(QUESTION)
            timed = send(str(kind), known + new(NEW_HEAD + QUESTION) if kind == "exact" else moved)
            found[str(kind)] += [timed] if number else []
        print(f"{length} tokens: round {number} of {rounds}", file=sys.stderr)
    return found


def row(kind: str, found: dict[str, list[Timed]], seed: int) -> dict[str, object]:
    """Return medians of one kind, and its ratios to an exact hit and to off."""
    values: dict[str, object] = {"kind": kind, "n": len(found[kind])}
    for name in ("first", "second", "total"):
        values[f"{name}_ms"] = round(float(np.median([getattr(one, name) for one in found[kind]])), 1)
    for name, other in (("first", "exact"), ("first", "off"), ("total", "exact"), ("total", "off")):
        mine, theirs = ([getattr(one, name) for one in found[side]] for side in (kind, other))
        ratio, interval = ratio_of_medians(mine, theirs, seed)
        values[f"{name}_of_{other}"] = round(ratio, 3)
        values[f"{name}_of_{other}_ci"] = [round(end, 3) for end in interval]
    return values


def main() -> int:
    """Measure the engines that are named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model that all engines load")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[600, 4_000], help="of the document")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2, help="that engines compute on")
    parser.add_argument(
        "--kv-tokens", type=int, default=23_000, help="that K/V have room for; exact hits need three prompts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=31_500)
    args = parser.parse_args()
    rows, versions = [], {}
    with tempfile.TemporaryDirectory(prefix="kvgraft-answers-") as folder:
        site = Site(args.model.resolve(), args.threads, max(args.tokens) + 400, Path(folder), kv_tokens=args.kv_tokens)
        for name in args.engines:
            engine = ENGINES[name]
            versions[name] = package_versions(Path(site.python(engine.venv)).parents[1], engine.packages)
            with EngineServer(engine, "kvgraft", site, args.port):
                for length in args.tokens:

                    def send(kind: str, prompt: list[int], name: str = name) -> Timed:
                        timed = ask(args.port, *asked(name, kind)(prompt))
                        time.sleep(_REST_S)
                        return timed

                    found = measure(send, length, args.rounds, np.random.default_rng(args.seed))
                    about = {"engine": name, "document_tokens": length, "prompt_tokens": length + NEW_HEAD + QUESTION}
                    rows += [about | row(kind, found, args.seed) for kind in KINDS]
    settings = {"rounds": args.rounds, "threads": args.threads, "seed": args.seed, "answer_tokens": NUM_TOKENS}
    print(json.dumps({"table": "answers", "settings": {**settings, "engines": versions}, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
