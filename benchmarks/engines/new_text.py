"""What a prompt of new text costs more with kvgraft than without, in each engine: time to first token, and processor time.

    .venv/bin/python benchmarks/engines/new_text.py --model DIR --engines vLLM --before ../before

Servers of one engine, without reuse, as it comes (with its own prefix cache), with kvgraft, with the sources of an
earlier checkout if one is named, and in vLLM with a connector that does nothing, answer prompts of random tokens for one
token, in turns, each first as often as the others; those that are not asked are held still.
K/V have room for a few prompts, so that every prompt has to evict, and what leaves is kept on the host. With `--healing` the
servers with kvgraft have text to heal all the time, which they do whenever they are not asked.

One server of an engine is some per cent faster than another that was started the same way, for as long as it runs: its memory
lies elsewhere. `--starts` starts all of them several times.

Processor time is that of all threads of a server from question to answer, by the kernel's scheduler: other load of the
machine does not count, but for the caches that it empties. Per side: medians, and the ratio of medians to those without
reuse and to those of the engine as it comes, with a bootstrapped 95 % interval over rounds, and the ratios of each start.
JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rounds import ratio_of_medians, tokens
from suite_servers import ENGINES, SEAM, EngineServer, Site
from vllm_server import package_versions

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF, EXACT = "off", "exact"
_AFTER_S, _BEFORE_S = 0.2, 0.05
"""Rests after an answer and before a question: what a server does meanwhile is in no figure."""
_FRONT = 40
_HEAL_EVERY = 4
"""Rounds after which text to heal is left anew."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt: seconds to its answer, seconds of processors, tokens that were reused."""

    seconds: float
    cpu_seconds: float
    reused_tokens: int


class Side:
    """One server, held still but for its turns."""

    def __init__(self, name: str, server: EngineServer) -> None:
        self.name = name
        self.found: list[Measured] = []
        self._server = server

    def ask(self, prompt: list[int]) -> Measured:
        """Ask for one token."""
        with self._running():
            before = cpu_seconds(self._server.group)
            reply = self._server.ask(prompt)
            spent = cpu_seconds(self._server.group) - before
        return Measured(reply.seconds, spent, reply.reused_tokens)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._server.resume()
        time.sleep(_BEFORE_S)
        try:
            yield
            time.sleep(_AFTER_S)
        finally:
            self._server.pause()


def cpu_seconds(group: int) -> float:
    """Return the processor time of all threads of a process group, finely: in nanoseconds by the kernel."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getpgid(int(folder.name)) == group:
                total += sum(int((task / "schedstat").read_text().split()[0]) for task in (folder / "task").iterdir())
        except (ProcessLookupError, FileNotFoundError):
            continue
    return total / 1e9


def measure(sides: list[Side], args: argparse.Namespace, rng: np.random.Generator) -> None:
    """Ask every side for the same prompts; those of the warm-up are not kept."""
    document = tokens(rng, args.tokens)
    for number in range(args.warmup + args.rounds):
        if args.healing and number % _HEAL_EVERY == 0:
            document = tokens(rng, args.tokens)
            for prompt in (document, tokens(rng, _FRONT) + document + tokens(rng, args.tokens)):
                for side in sides:
                    side.ask(prompt)
        prompt = tokens(rng, args.tokens)
        start = number % len(sides)
        for side in sides[start:] + sides[:start]:
            found = side.ask(prompt)
            if number >= args.warmup:
                side.found.append(found)
        print(f"round {number + 1} of {args.warmup + args.rounds}", file=sys.stderr)


def rows_of(engine: str, starts: list[dict[str, list[Measured]]], seed: int) -> list[dict[str, object]]:
    """Return a row per side over what was measured of it in all starts."""
    found = {name: [one for start in starts for one in start[name]] for name in starts[0]}
    others = {name: mine for name, mine in found.items() if name in (OFF, EXACT, SEAM)}
    return [
        {"engine": engine, "side": name, **figures(mine, others, seed), "ms_of_exact_by_start": of_exact(starts, name)}
        for name, mine in found.items()
    ]


def of_exact(starts: list[dict[str, list[Measured]]], name: str) -> list[float]:
    """Return a side's ratio of medians to those of the engine as it comes, start by start."""
    medians = [{side: np.median([one.seconds for one in start[side]]) for side in (name, EXACT)} for start in starts]
    return [round(float(start[name] / start[EXACT]), 4) for start in medians]


def figures(found: list[Measured], others: dict[str, list[Measured]], seed: int) -> dict[str, object]:
    """Return medians, and their ratios to those of other sides."""
    row: dict[str, object] = {
        "rounds": len(found),
        "reused_tokens": max(one.reused_tokens for one in found),
    }
    for name in ("seconds", "cpu_seconds"):
        mine = [getattr(one, name) for one in found]
        key = name.replace("seconds", "ms")
        row[key] = round(1e3 * float(np.median(mine)), 2)
        for other, theirs in others.items():
            ratio, interval = ratio_of_medians(mine, [getattr(one, name) for one in theirs], seed)
            row[f"{key}_of_{other}"] = round(ratio, 4)
            row[f"{key}_of_{other}_ci"] = [round(end, 4) for end in interval]
        row[f"{key}_each"] = [round(1e3 * value, 2) for value in mine]
    return row


def servers_of(name: str, site: Site, args: argparse.Namespace, stack: ExitStack) -> list[Side]:
    """Start a server per side, each held still while the next one starts."""
    here = Path(__file__).parents[2]
    trees = {OFF: here, EXACT: here} | ({SEAM: here} if name == "vLLM" else {})
    trees |= ({"before": args.before.resolve()} if args.before else {}) | {"kvgraft": here}
    sides = []
    for number, (side, tree) in enumerate(trees.items()):
        print(f"{name} {side}: starting", file=sys.stderr)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), str(Path(__file__).parent)])
        own = replace(site, folder=site.folder / side)
        own.folder.mkdir(exist_ok=True)
        variant = side if side in (OFF, EXACT, SEAM) else "kvgraft"
        server = stack.enter_context(EngineServer(ENGINES[name], variant, own, args.port + 20 * number))
        server.pause()
        sides.append(Side(side, server))
    return sides


def main() -> int:
    """Measure the engines that are named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model that all engines load")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--before", type=Path, help="checkout to measure beside this one")
    parser.add_argument("--tokens", type=int, default=400, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=40, help="of each start")
    parser.add_argument("--starts", type=int, default=1, help="of all servers")
    parser.add_argument("--warmup", type=int, default=12, help="rounds that are not counted: they fill the K/V")
    parser.add_argument("--healing", action="store_true", help="leave text to heal")
    parser.add_argument("--threads", type=int, default=1, help="that engines compute on")
    parser.add_argument("--kv-tokens", type=int, default=4_800, help="that K/V have room for; vLLM has its 1 GiB")
    parser.add_argument(
        "--host-bytes",
        help="host memory of donors; what 12 prompts fill shows a server that has run for long, whose memory has its pages",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=31_600)
    args = parser.parse_args()
    rows, versions = [], {}
    with tempfile.TemporaryDirectory(prefix="kvgraft-new-text-") as folder:
        site = Site(
            args.model.resolve(), args.threads, 3 * args.tokens + 256, Path(folder), args.host_bytes, args.kv_tokens
        )
        for name in args.engines:
            engine = ENGINES[name]
            versions[name] = package_versions(Path(site.python(engine.venv)).parents[1], engine.packages)
            starts = []
            for number in range(args.starts):
                with ExitStack() as stack:
                    sides = servers_of(name, site, args, stack)
                    measure(sides, args, np.random.default_rng([args.seed, number]))
                    starts.append({side.name: side.found for side in sides})
            rows += rows_of(name, starts, args.seed)
    settings = {
        key: getattr(args, key)
        for key in ("tokens", "rounds", "starts", "warmup", "healing", "threads", "kv_tokens", "seed")
    }
    print(json.dumps({"table": "new-text", "settings": {**settings, "engines": versions}, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
