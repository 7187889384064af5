"""What the inspector's page costs a server: time to the first token and tokens per second, without it, with it, and watched.

    python benchmarks/inspector_overhead.py [--model smollm2-135m] [--rounds 40] [--pages 1] [--json]

Two servers of one model, one without `--ui`. In every round each of three ways answers one streamed request over a prompt of
its own of as many random words: `off`, `on` (with `--ui`, no page open) and `open` (pages follow the stream of news, and ask
for the engine's state as often as the page does). The order changes from round to round. Ratios are to `off` of all rounds,
with 95 % bootstrap intervals over rounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from kvgraft.bench.server_process import ServerProcess, end_on_sigterm
from suite.statistics import array_median, median, ratio_of_medians, with_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = ("off", "on", "open")
ENGINE_PERIOD_S = 2.0
"""How often the page asks for the engine's state."""
WORDS = (
    "river",
    "stone",
    "window",
    "paper",
    "engine",
    "garden",
    "letter",
    "market",
    "bridge",
    "silver",
    "winter",
    "signal",
)


class Timed(NamedTuple):
    """One answer: seconds to its first token, and tokens per second after it."""

    ttft_s: float
    tokens_per_s: float


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--pages", type=int, default=1, help="browsers that watch")
    parser.add_argument("--words", type=int, default=300, help="of a prompt")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        plain = stack.enter_context(ServerProcess(["--model", args.model]))
        shown = stack.enter_context(ServerProcess(["--model", args.model, "--ui"]))
        urls = {"off": plain.url, "on": shown.url, "open": shown.url}
        found = measure(urls, args)
    result = {"settings": vars(args) | {"json": True}, "ways": summary(found, args.seed)}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for way, row in result["ways"].items():
            figures = (f"{name} {value:.4g}" for name, value in row.items() if value is not None)
            print(f"{way}: {', '.join(figures)}")
    return 0


def measure(urls: dict[str, str], args: argparse.Namespace) -> dict[str, list[Timed]]:
    """Answers by way, round by round; the first round warms up and does not count."""
    rng = random.Random(args.seed)
    found: dict[str, list[Timed]] = {way: [] for way in WAYS}
    for number in range(args.rounds + 1):
        for way in rng.sample(WAYS, len(WAYS)):
            prompt = " ".join(rng.choices(WORDS, k=args.words))
            with watching(urls[way], args.pages if way == "open" else 0):
                timed = answer(urls[way], prompt, args.output_tokens)
            if number:
                found[way].append(timed)
        print(f"\rround {number} of {args.rounds}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def answer(url: str, prompt: str, num_tokens: int) -> Timed:
    """Ask once, streamed."""
    asked = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = _connection(url)
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"{url} answered {reply.status}: {reply.read()[:300]!r}")
    times = [time.perf_counter() for line in reply if line.startswith(b"data: {")]
    connection.close()
    return Timed(times[0] - started, (num_tokens - 1) / (times[-1] - times[0]))


@contextmanager
def watching(url: str, num_pages: int) -> Iterator[None]:
    """Have pages open, each of which has heard of the server before the block begins."""
    ended = threading.Event()
    pages = [_Page(url, ended) for _ in range(num_pages)]
    try:
        for page in pages:
            page.begin()
        yield
    finally:
        ended.set()
        for page in pages:
            page.end()


class _Page:
    """Requests of a browser with the page open."""

    def __init__(self, url: str, ended: threading.Event) -> None:
        self._url, self._ended = url, ended
        self._heard = threading.Event()
        self._events = _connection(url)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._follow, self._ask)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()
        if not self._heard.wait(30):
            sys.exit(f"{self._url} sends its page nothing")

    def end(self) -> None:
        for thread in self._threads:
            thread.join()

    def _follow(self) -> None:
        self._events.request("GET", "/ui/events")
        reply = self._events.getresponse()
        while not self._ended.is_set() and (line := reply.readline()):
            if line.startswith(b"data:"):
                self._heard.set()
        self._events.close()

    def _ask(self) -> None:
        while not self._ended.is_set():
            connection = _connection(self._url)
            connection.request("GET", "/ui/api/engine")
            connection.getresponse().read()
            connection.close()
            self._ended.wait(ENGINE_PERIOD_S)


def summary(found: dict[str, list[Timed]], seed: int) -> dict[str, dict[str, float | None]]:
    """Medians, and ratios to `off`."""
    ttft = {way: [timed.ttft_s for timed in rows] for way, rows in found.items()}
    speed = {way: [timed.tokens_per_s for timed in rows] for way, rows in found.items()}
    return {
        way: {
            "ttft_ms": 1e3 * (median(ttft[way]) or 0.0),
            "tokens_per_s": median(speed[way]),
            **with_interval("ttft_ratio", ratio_of_medians, [ttft[way], ttft["off"]], seed),
            **with_interval("paired_ttft_ratio", array_median, [_over(ttft[way], ttft["off"])], seed),
            **with_interval("tokens_per_s_ratio", ratio_of_medians, [speed[way], speed["off"]], seed),
        }
        for way in found
    }


def _over(first: list[float], second: list[float]) -> list[float]:
    return [one / other for one, other in zip(first, second, strict=True)]


def _connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
