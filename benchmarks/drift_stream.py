"""A stream of requests with documents that change slowly: the share that is reused near exact, with healing and without.

    python benchmarks/drift_stream.py [--model graft-tiny] [--requests 2000] [--idle 0.5] [--json]

Each prompt is a head of its own, several documents of a working set in any order, and a question. Documents leave the set
and novel ones come, which are read for the first time after other text, mostly grafts. Three engines
answer the same stream, drawn from the seed:

- `healing`: between two requests as many rows are healed as idle time would allow: with `--idle 0.5` the engine is idle half
  of the time, so as many as requests have computed; what there is nothing to do with is lost;
- `none`: the same without healing;
- `oracle`: computes everything, so that all donors are of generation 0.

Per window of requests, as shares of prompt tokens: what exact prefixes and donors of generation 0 (`exact`), of at most
1 (`near`) and of any (`any`) have before the prompt comes, and what was given or grafted from the first two (`reused_near`;
of the oracle, 0).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.config import EngineConfig
from kvgraft.donors import DonorQuery
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle.healing import MOST_ROWS
from kvgraft.engine.model.loading import load_model
from kvgraft.engine.requests.options import RequestOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.engine.requests.request import RequestOutput
    from kvgraft.types import TokenArray

ARMS = ("healing", "none", "oracle")


@dataclass(frozen=True)
class Traffic:
    """What the stream is like; sizes in tokens.

    Attributes:
        requests: How many.
        documents: In the working set.
        per_prompt: Documents of a prompt.
        novel: Share of requests before which a document of the set is replaced by a novel one.
        lengths: Shortest and longest document.
        seed: Of everything that is drawn.
    """

    requests: int
    documents: int
    per_prompt: int
    novel: float
    lengths: tuple[int, int]
    seed: int

    def prompts(self, vocabulary: int) -> Iterator[TokenArray]:
        """Yield the prompts of the stream, the same ones every time."""
        rng = np.random.default_rng(self.seed)

        def words(low: int, high: int) -> TokenArray:
            return rng.integers(3, vocabulary, int(rng.integers(low, high + 1)))

        known = [words(*self.lengths) for _ in range(self.documents)]
        for _ in range(self.requests):
            if rng.random() < self.novel:
                known[int(rng.integers(self.documents))] = words(*self.lengths)
            chosen = rng.choice(self.documents, self.per_prompt, replace=False)
            yield np.concatenate([words(20, 40), *(known[number] for number in chosen), words(8, 16)])


@dataclass
class Window:
    """Tokens of some consecutive requests."""

    prompt: int = 0
    exact: int = 0
    near: int = 0
    any: int = 0
    reused_near: int = 0

    def shares(self) -> dict[str, float]:
        """Of the prompts' tokens."""
        names = ("exact", "near", "any", "reused_near")
        return {name: round(getattr(self, name) / self.prompt, 4) for name in names}


@dataclass
class Arm:
    """One engine and what it has done so far.

    Attributes:
        name: One of `ARMS`.
        engine: Answers.
        idle: Share of the time that it has nothing to do.
        computed: Rows that requests computed.
        windows: What was counted.
    """

    name: str
    engine: Engine
    idle: float
    computed: int = 0
    windows: list[Window] = field(default_factory=list)
    credit: float = 0.0

    def serve(self, prompt: TokenArray) -> None:
        """Count what is there for a prompt, answer it, and heal as long as one may."""
        window = self.windows[-1]
        window.prompt += len(prompt)
        for name, generation in (("exact", 0), ("near", 1), ("any", None)):
            setattr(window, name, getattr(window, name) + self._held(prompt, generation))
        report = self._answer(prompt).report
        near = sum(span.length for span in report.spans if span.generation <= 1)
        window.reused_near += report.exact_tokens + near
        self.computed += report.computed_tokens
        self._heal(report.computed_tokens)

    def _held(self, prompt: TokenArray, generation: int | None) -> int:
        """Tokens of a prompt that its exact prefix and donors of at most `generation` have."""
        request = self.engine.builder.build(prompt)
        prefix_len = min(self.engine.manager.look(request).total, len(prompt) - 1)
        found = self.engine.space.donors.find(
            DonorQuery(request.namespace, prompt, start=prefix_len, max_generation=generation)
        )
        return prefix_len + sum(match.length for match in found)

    def _answer(self, prompt: TokenArray) -> RequestOutput:
        reuse = "off" if self.name == "oracle" else "graft"
        self.engine.add(self.engine.builder.build(prompt, RequestOptions(SamplingParams(1, ignore_eos=True), reuse)))
        output = None
        while self.engine.has_work:
            for event in self.engine.step():
                if event.error is not None:
                    raise SystemExit(f"{self.name}: {event.error}")
                assert event.part is not None
                output = event.part.output or output
        assert output is not None
        return output

    def _heal(self, computed: int) -> None:
        self.credit += computed * self.idle / (1.0 - self.idle)
        while self.credit > 0:
            before, room = self.engine.healer.num_tokens, self.engine.space.available
            # Not `Engine.heal_step`: its pieces depend on how fast the machine is.
            if not self.engine.healer.step(MOST_ROWS, math.inf, room, is_alone=True):
                self.credit = 0.0  # idle time cannot be saved up
                return
            self.credit -= self.engine.healer.num_tokens - before

    def figures(self) -> dict[str, Any]:
        """As JSON values."""
        healer = self.engine.healer
        return {
            "computed_tokens": self.computed,
            "healed_tokens": healer.num_tokens,
            "healed_requests": healer.num_requests,
            "dropped": healer.dropped,
            "windows": [window.shares() for window in self.windows],
        }


def measured(model: str, traffic: Traffic, settings: dict[str, object], *, idle: float, windows: int) -> dict[str, Any]:
    """Run the stream past all arms."""
    arms = []
    for name in ARMS:
        config = EngineConfig.from_dict(settings | {"heal": "idle" if name == "healing" else "off"})
        arm = Arm(name, Engine(load_model(model), config), idle)
        for number, prompt in enumerate(traffic.prompts(arm.engine.loaded.vocab_size)):
            if number * windows // traffic.requests == len(arm.windows):
                arm.windows.append(Window())
            arm.serve(prompt)
        arm.engine.check()
        arms.append(arm)
        arm.engine.close()
        print(f"{name}: {arm.windows[-1].shares()}", file=sys.stderr, flush=True)
    return {arm.name: arm.figures() for arm in arms}


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny", help="name or directory")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--documents", type=int, default=24, help="in the working set")
    parser.add_argument("--per-prompt", type=int, default=3)
    parser.add_argument(
        "--novel", type=float, default=0.25, help="share of requests before which a document is replaced"
    )
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=[60, 120], help="shortest and longest document, in tokens"
    )
    parser.add_argument("--idle", type=float, default=0.5, help="share of the time that the engine is idle")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--num-slots", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not 0 <= args.idle < 1:
        parser.error("--idle must be at least 0 and below 1")
    traffic = Traffic(args.requests, args.documents, args.per_prompt, args.novel, tuple(args.lengths), args.seed)
    # What is computed again of a graft changes no origin, so that the quickest does.
    settings = {"num_slots": args.num_slots, "selection": "none", "correction": "none"}
    found = measured(args.model, traffic, settings, idle=args.idle, windows=args.windows)
    if args.json:
        print(
            json.dumps(
                {"model": Path(args.model).name, "idle": args.idle, "requests": args.requests, **found}, indent=1
            )
        )
        return 0
    for name, arm in found.items():
        print(f"{name}: {arm['computed_tokens']} tokens computed, {arm['healed_tokens']} healed")
        for shares in arm["windows"]:
            print("  " + "  ".join(f"{key} {share:.1%}" for key, share in shares.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
