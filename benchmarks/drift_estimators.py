"""Compare estimators of drift on the same requests: KL to full prefill, paired.

    python benchmarks/drift_estimators.py rag tools builtin --policy none query_seam:0.1+positions query_seam:0.1+likeness \
        --limit 6 --journal drift.requests.jsonl [--against query_seam:0.1+likeness]

The instrument is that of `kvgraft bench fidelity` (docs/fidelity.md), without answers being scored. Beside the engine's
corrections there are those of `ESTIMATORS`, ridges that `--ridge NAME=CONST,NEAR,REACH,LIKE,NOISE` names, and beside its
policies `layer1`. With `--journal` a run that was interrupted goes on; JSON goes to stdout.

`layer1:R+mean` is the closest to AgentKVShift (arXiv 2607.21604) that can be had by its description, since no code of it is
public: probes are the share R of tokens with keys that moved most in layer 1, and w times the probes' mean movement, per
layer and run, is added to K and V of the others. Not taken over: probe sets of their own for K and V. w is 1 or 1/2, keys
are compared at position 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fidelity_pairs import compare
from kvgraft.bench.fidelity import settings as fidelity_settings
from kvgraft.bench.fidelity.meta import environment
from kvgraft.bench.fidelity.one_space import in_one_space
from kvgraft.bench.fidelity.run import SuiteRunner, plan_suite
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.bench.fidelity.suites import load_suites
from kvgraft.bench.journal import Journal
from kvgraft.config import EngineConfig
from kvgraft.engine import LLM
from kvgraft.graft.drift import CORRECTIONS, DriftCorrection
from kvgraft.graft.drift_estimate import DriftEstimator, KernelRidge, MeanShift
from kvgraft.graft.select import KVDeviation, Recompute

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.bench.fidelity.suites import Suite
    from kvgraft.graft.drift_estimate import ReusedKV, Shift
    from kvgraft.graft.drift_layout import RunLayout
    from kvgraft.graft.select.base import Observation, SelectionContext


@dataclass(frozen=True)
class WeightedMean(DriftEstimator):
    """`weight` times the mean movement of a run's sample, per layer."""

    weight: float = 1.0

    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """See `DriftEstimator`."""
        return float(width * (2 * num_sampled + num_rest))

    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """See `DriftEstimator`."""
        mean = MeanShift(shrink=False).for_layer(layout, reused)

        def shift(moved: Tensor, out: Tensor) -> Tensor:
            return mean(moved, out).mul_(self.weight)

        return shift


@dataclass(frozen=True)
class UnguardedRidge(KernelRidge):
    """A ridge that corrects runs however few of their tokens are sampled, as the engine's did when these were measured."""

    least_sample: ClassVar[int] = 1


@dataclass(frozen=True)
class StronglyGuardedRidge(KernelRidge):
    """A ridge that leaves runs with fewer than 16 sampled tokens alone."""

    least_sample: ClassVar[int] = 16


@dataclass(frozen=True)
class Layer1Probes(KVDeviation):
    """Tokens with keys that moved most in layer 1, as AgentKVShift's probes: they stand for their run."""

    name: ClassVar[str] = "layer1"
    ratio: float = 0.1

    def _choose(self, context: SelectionContext, observation: Observation, budget: int) -> Recompute:
        chosen: NDArray[np.int64] = super()._choose(context, observation, budget).positions
        return Recompute(chosen, sample=chosen)


ESTIMATORS: dict[str, DriftEstimator] = {
    "likeness": KernelRidge(like=3.0),
    "positions": KernelRidge(like=0.0),
    "positions1": UnguardedRidge(like=0.0),
    "positions16": StronglyGuardedRidge(like=0.0),
    "shrunk_mean": MeanShift(),
    "mean": WeightedMean(),
    "half_mean": WeightedMean(0.5),
}
"""By the name of a correction. In results of commit bc541f4 `positions` is `positions1`, and `positions8` is `positions`."""


def ridge(spec: str) -> tuple[str, KernelRidge]:
    """Parse the name and the constants of a ridge."""
    name, _, numbers = spec.partition("=")
    const, near, reach, like, noise = map(float, numbers.split(","))
    return name, KernelRidge(const=const, near=near, reach=reach, like=like, noise=noise)


def without_answers(suite: Suite) -> Suite:
    """Return the suite with nothing to score: decoding answers takes most of the time of a setting."""
    return replace(suite, requests=tuple(replace(request, answers=(), stale=()) for request in suite.requests))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the journal does not have yet, and lay out all of it."""
    estimators = ESTIMATORS | dict(map(ridge, args.ridge))
    CORRECTIONS.update({name: DriftCorrection(estimator) for name, estimator in estimators.items()})
    fidelity_settings.POLICIES[Layer1Probes.name] = Layer1Probes
    llm = LLM(args.model, in_one_space(EngineConfig(num_slots=args.num_slots, dtype=args.dtype)))
    settings = fidelity_settings.parse_settings(args.policy, [], llm.policy)
    subject = Subject(llm, args.max_prompt_tokens)
    sample = {"side": args.split, "limit": args.limit, "seed": args.seed}
    suites = [without_answers(suite) for suite in load_suites(args.suites, args.data)]
    plans = [plan_suite(suite, subject, **sample) for suite in suites]
    facts = environment() | {
        "model": Path(args.model).name,
        "fingerprint": llm.loaded.fingerprint,
        "dtype": args.dtype,
        "max_prompt_tokens": args.max_prompt_tokens,
        "settings": [setting.label for setting in settings],
        "ridges": args.ridge,
        **sample,
    }
    journal = Journal(args.journal, facts)
    runner = SuiteRunner(llm, subject, settings, num_controls=0, seed=args.seed)
    for plan in plans:
        runner.run(plan, journal, lambda: print(".", end="", file=sys.stderr, flush=True))
    whole = [
        record
        for record in journal.under()
        if len(record["settings"]) == len(settings)
        and all(found["is_grafted"] for found in record["settings"].values())
    ]
    if not whole:
        raise SystemExit("nothing was grafted for any of these requests; raise --limit or --max-prompt-tokens")
    return facts | {
        "rows": compare(whole, args.against, args.seed),
        "requests": [
            {
                "suite": record["suite"],
                "rid": record["rid"],
                "num_tokens": record["num_tokens"],
                "mean_kl": {name: figures["mean_kl"] for name, figures in record["settings"].items()},
                "first_kl": {name: figures["first_kl"] for name, figures in record["settings"].items()},
            }
            for record in whole
        ],
    }


def main() -> int:
    """Parse the command line, measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("suites", nargs="+")
    add("--policy", nargs="+", required=True)
    add("--ridge", nargs="+", default=[], metavar="NAME=CONST,NEAR,REACH,LIKE,NOISE")
    add("--against", nargs="+", default=["none"])
    add("--data", default="../shared/data/dev")
    add("--split", choices=("dev", "test"), default="dev")
    add("--limit", type=int, default=6)
    add("--seed", type=int, default=0)
    add("--max-prompt-tokens", type=int, default=800)
    add("--model", default="smollm2-135m")
    add("--dtype", default="float32")
    add("--num-slots", type=int, default=6000)
    add("--journal", type=Path)
    print(json.dumps(measure(parser.parse_args()), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
