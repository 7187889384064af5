"""How long a running stream stands still when many known prompts arrive at once, by engine, with kvgraft and without reuse.

    python benchmarks/record.py burst-embedded -- python benchmarks/engines/burst_stalls.py --engine embedded

One server per run. Documents are read; then, round after round, a stream runs alone for a moment, and `--prompts` prompts
about these documents arrive at once, each behind a head that is new. Sides take turns: `kvgraft` asks with defaults, `off`
asks the same server to reuse nothing; the sizes are the same, and heads are others, so that nothing is an exact hit. What
counts is the longest gap between two tokens of the stream while the burst is answered. Prints one JSON object with the
median over rounds for each side, and of their ratios.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from suite_servers import ENGINES, EngineServer, Site
from vllm_server import HOST, Json, ServerError, stream_events, timed_events

from kvgraft.models.bundled import bundled_model_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIDES = ("kvgraft", "off")
NAMES = {"embedded": "kvgraft serve", "vllm": "vLLM", "sglang": "SGLang"}
OPTIONS: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "vllm": ("--max-num-seqs", "32", "--max-num-batched-tokens", "2048"),
    "sglang": ("--max-running-requests", "32", "--chunked-prefill-size", "2048"),
}
"""Room for the whole burst, and steps of equal size; what stands last counts."""
_SECONDS = 900.0


@dataclass(slots=True)
class Stream:
    """Arrivals of a running answer's tokens, `time.perf_counter()`."""

    times: list[float] = field(default_factory=list)

    def gaps(self, start: float, stop: float) -> list[float]:
        """Return seconds between tokens, of all gaps of which some lies between two moments; ascending."""
        return sorted(b - a for a, b in itertools.pairwise(self.times) if b > start and a < stop)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=tuple(NAMES), required=True)
    parser.add_argument("--model", type=Path, help="folder; default: graft-tiny")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=1_900)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=8_790)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="folder of the environments")
    args = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, server_of(args, Path(folder)) as server:
        rows = measure(server, args, rng)
    print(json.dumps({"engine": args.engine, "summary": summary(rows), "rows": rows}, indent=1))
    return 0


def server_of(args: argparse.Namespace, folder: Path, store: str = "") -> EngineServer:
    """Return a server of the engine with kvgraft, not yet started; with a store of donors if one is named."""
    engine = ENGINES[NAMES[args.engine]]
    model = args.model or bundled_model_path()
    site = Site(model, args.threads, 4_096, folder, kv_tokens=120_000, root=args.root, store=store)
    widened = replace(engine, command=lambda *given: [*engine.command(*given), *OPTIONS[args.engine]])
    return EngineServer(widened, "kvgraft", site, args.port)


def measure(server: EngineServer, args: argparse.Namespace, rng: random.Random) -> list[Json]:
    """Return a row for each round and side; the first round is not counted."""
    documents = [words(rng, args.document_tokens) for _ in range(args.documents)]
    for document in documents:
        server.ask(words(rng, 50) + document)
    rows: list[Json] = []
    for number in range(args.rounds + 1):
        for side in rng.sample(SIDES, len(SIDES)):
            prompts = [words(rng, 60) + documents[at % len(documents)] + words(rng, 40) for at in range(args.prompts)]
            row = {"round": number, "side": side, **burst(args, prompts, side, words(rng, 40))}
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows += [row] if number else []
    return rows


def words(rng: random.Random, count: int) -> list[int]:
    """Token ids without meaning: what is timed does not depend on it."""
    return [rng.randrange(10, 500) for _ in range(count)]


def burst(args: argparse.Namespace, prompts: Sequence[Sequence[int]], side: str, head: Sequence[int]) -> Json:
    """Answer all prompts at once beside a stream."""
    engine = ENGINES[NAMES[args.engine]]

    with (
        running(args.port, engine.path, body_of(args.engine, head, "off", 2_000)) as stream,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        time.sleep(1.0)
        quiet = stream.gaps(0.0, time.perf_counter())
        started = time.perf_counter()
        first = list(pool.map(lambda prompt: first_token_s(args, prompt, side, 8), prompts))
        stop = time.perf_counter()
        gaps = stream.gaps(started, stop)
    if not quiet or not gaps:
        raise ServerError("the stream ended, or had not begun, when the burst came")
    return {
        "longest_ms": round(1e3 * gaps[-1], 1),
        "quiet_ms": round(1e3 * statistics.median(quiet), 1),
        "burst_s": round(stop - started, 2),
        "median_first_token_s": round(statistics.median(first), 2),
    }


def first_token_s(args: argparse.Namespace, prompt: Sequence[int], side: str, tokens: int) -> float:
    """Ask for an answer of so many tokens, read all of it, and return the seconds to its first one."""
    body = body_of(args.engine, prompt, side, tokens)
    return timed_events(args.port, ENGINES[NAMES[args.engine]].path, body, _SECONDS)[0][0]


def body_of(engine: str, token_ids: Sequence[int], side: str, tokens: int) -> Json:
    """Return a streamed question of so many tokens, which reuses nothing if the side is `off`."""
    body = dict(ENGINES[NAMES[engine]].body(token_ids))
    mode = "off" if side == "off" else "graft"
    if engine == "sglang":
        sampling = {**body["sampling_params"], "max_new_tokens": tokens, "custom_params": {"kvgraft": mode}}
        return body | {"sampling_params": sampling}
    asked = {"kv_transfer_params": {"kvgraft": mode}} if engine == "vllm" else {"kvgraft": {"reuse": mode}}
    return body | {"max_tokens": tokens} | asked


@contextmanager
def running(port: int, path: str, body: Json) -> Iterator[Stream]:
    """Run an answer beside; its connection is closed in the end, and the server gives it up."""
    stream, is_over = Stream(), threading.Event()
    connection = http.client.HTTPConnection(HOST, port, timeout=_SECONDS)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        raise ServerError(f"status {response.status}: {response.read()[:500].decode(errors='replace')}")

    def read() -> None:
        for _ in stream_events(response):
            stream.times.append(time.perf_counter())
            if is_over.is_set():
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield stream
    finally:
        is_over.set()
        reader.join()
        response.close()
        connection.close()


def summary(rows: Sequence[Json]) -> Json:
    """Return medians over rounds by side, and of the ratio of the longest gaps of one round."""
    found: Json = {}
    for side in SIDES:
        mine = [row for row in rows if row["side"] == side]
        found[side] = {
            key: statistics.median(row[key] for row in mine) for key in mine[0] if key not in ("round", "side")
        }
    longest = {(row["round"], row["side"]): row["longest_ms"] for row in rows}
    ratios = [longest[number, "kvgraft"] / value for (number, side), value in longest.items() if side == "off"]
    found["longest_times_off"] = round(statistics.median(ratios), 2)
    found["longest_times_off_of_medians"] = round(found["kvgraft"]["longest_ms"] / found["off"]["longest_ms"], 2)
    return found


if __name__ == "__main__":
    sys.exit(main())
