"""Cost of drift correction by itself, in the shapes of a model, without the model: all estimators in turn, round by round.

    python benchmarks/drift_cost.py [--lengths 600 2000 4000] [--rounds 15] [--dtype float32]

One run of each length was moved. Its sample is the 16 tokens at its head (`head`), or a tenth of its tokens, more of them
near the seam, as `query_seam` chooses (`tenth`). K/V are random: arithmetic takes as long. What a pass does in all layers
that drift is timed in three parts: `once`, what is formed for all layers together; `form`, the corrected K/V; `write`, their
way back into slots. Medians over rounds of milliseconds of processor time of the one thread, so that what else runs on the
machine counts little. JSON goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from kvgraft.bench.fidelity.meta import environment
from kvgraft.engine.model.drift_pass import BatchDrift
from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.drift_estimate import KernelRidge
from kvgraft.graft.drift_plan import DriftPlan
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.graft.select import SelectionContext
from kvgraft.memory.pool import LayerShape, SlotPool

ESTIMATORS = {"likeness": KernelRidge(like=3.0), "positions": KernelRidge(like=0.0)}
_LIVE = 30
"""New tokens before the run, and after it."""


@dataclass(frozen=True)
class Shape:
    """Layers, K/V heads and channels; by default those of SmolLM2-135M."""

    layers: int = 30
    heads: int = 3
    dim: int = 64


@dataclass
class Timer:
    """Milliseconds by part of the pass."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, part: str, seconds: float) -> None:
        """Take one round in."""
        self.parts.setdefault(part, []).append(1e3 * seconds)

    def medians(self) -> dict[str, float]:
        """Return the median of each part and of their sums."""
        sums = [sum(values) for values in zip(*self.parts.values(), strict=True)]
        return {name: round(statistics.median(values), 2) for name, values in (*self.parts.items(), ("all", sums))}


def context_of(length: int) -> SelectionContext:
    """One run of `length` tokens between new ones."""
    reused = np.arange(_LIVE, _LIVE + length)
    num_tokens = length + 2 * _LIVE
    return SelectionContext(num_tokens, reused, np.arange(length), np.setdiff1d(np.arange(num_tokens), reused))


def sample_of(context: SelectionContext, name: str, rng: np.random.Generator) -> np.ndarray:
    """Positions that are computed again."""
    if name == "head":
        return context.reused[:16]
    weight = rng.exponential(size=len(context.reused)) / (1 + context.seam_distance / 16)
    return np.sort(context.reused[np.argsort(-weight)[: len(context.reused) // 10]])


class Case:
    """One prompt in slots of its own.

    Args:
        shape: Of the model.
        length: Of the run.
        sample: Name of the sample.
        dtype: Of the pool.
        seed: Of everything that is drawn.
    """

    def __init__(self, shape: Shape, length: int, sample: str, dtype: torch.dtype, seed: int) -> None:
        self.context = context_of(length)
        self.sample = sample_of(self.context, sample, np.random.default_rng(seed))
        generator = torch.Generator().manual_seed(seed)
        self.pool = SlotPool([LayerShape(shape.heads, shape.dim)] * shape.layers, self.context.num_tokens, dtype)
        for layer in range(shape.layers):
            for tensor in (self.pool.keys(layer), self.pool.values(layer)):
                tensor.normal_(generator=generator)
        self.rope = RopeSpec(1e5 ** -(torch.arange(shape.dim // 2) / (shape.dim // 2)), RopePairing.HALF)
        self.rows = np.union1d(self.sample, self.context.live)
        size = (len(self.rows), shape.heads, shape.dim)
        self.new = [torch.randn(size, generator=generator).to(dtype) for _ in range(2)]

    def run(self, correction: DriftCorrection, timer: Timer) -> None:
        """Correct all layers once."""
        layers = len(self.pool.layers)
        computed = np.zeros(self.context.num_tokens, np.bool_)
        plan = DriftPlan.of(self.context, self.rows, self.sample, computed, correction)
        started = time.thread_time()
        drift = plan.between(0, len(self.rows))
        rows = SequenceRows(
            np.zeros(len(self.rows), np.int64), self.rows, np.arange(self.context.num_tokens), drift=drift
        )
        batch = BatchDrift([rows], self.pool, [self.rope] * layers)
        # What is formed once is formed in the first layer that drifts: that one runs twice.
        batch.corrected(1, *self.new)
        first = time.thread_time() - started
        formed = written = 0.0
        for layer in range(layers):
            begin = time.thread_time()
            corrected = batch.corrected(layer, *self.new)
            middle = time.thread_time()
            for kv in corrected:
                kv.write()
            formed += middle - begin
            written += time.thread_time() - middle
        timer.add("once", max(0.0, first - formed / (layers - correction.first_layer)))
        timer.add("form", formed)
        timer.add("write", written)


def main() -> int:
    """Parse the command line, time, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[600, 2000, 4000])
    add("--rounds", type=int, default=15)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in args.lengths:
        for sample in ("head", "tenth"):
            case = Case(Shape(), length, sample, getattr(torch, args.dtype), args.seed)
            timers = {name: Timer() for name in ESTIMATORS}
            for number in range(args.rounds + 1):
                for name, estimator in ESTIMATORS.items():
                    # The first round warms up.
                    case.run(DriftCorrection(estimator), timers[name] if number else Timer())
            rows += [
                {"length": length, "sample": sample, "num_sampled": len(case.sample), "estimator": name}
                | timers[name].medians()
                for name in ESTIMATORS
            ]
            print(*rows[-len(ESTIMATORS) :], sep="\n", file=sys.stderr)
    print(json.dumps(environment() | {"arguments": vars(args), "shape": vars(Shape()), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
