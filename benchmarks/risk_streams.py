"""Risk asked against risk held, on losses that a real model had: many calibrations, each followed by a served stream.

    kvgraft calibrate --model smollm2-135m --prompts builtin --chat --loss kl:1 --repair before --all-notches \
        --json > losses.json
    python benchmarks/risk_streams.py losses.json [--streams 200] [--epsilon 0.02 0.05 0.1] [--prompts 100 150 300] [--json]

The grafted requests of `kvgraft calibrate --repair before --json`, each with its loss at every notch, are taken for all the
traffic that there is, so that the true risk of every notch is known: their mean. A stream draws its calibration prompts from
them, picks a notch by Learn then Test, and serves requests drawn likewise, all of them audited by the shipped controller.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench_risk import text_of
from kvgraft.fidelity.control import LossSample, RiskController, RiskEvent, RiskTarget, fixed_sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Traffic:
    """All requests that there are.

    Attributes:
        loss: Its name.
        notches: From "full" to the boldest.
        losses: (notches, requests), 0 at "full".
        is_binary: Whether losses are 0 or 1.
    """

    loss: str
    notches: tuple[str, ...]
    losses: NDArray[np.float64]
    is_binary: bool

    @classmethod
    def read(cls, path: Path) -> Traffic:
        """From the output of `kvgraft calibrate --json`."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            notches, loss = tuple(found["notches"]), found["loss"]
            losses = [found["losses"][name] for name in notches[1:]]
            # Files from before repairs after the first token know one part, and do not name it.
            grafted = [known if isinstance(known, list) else known["whole"] for known in losses]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: no output of 'kvgraft calibrate --json' ({error!r})") from error
        counts = {len(each) for each in grafted}
        if len(counts) != 1 or counts == {0}:
            raise SystemExit(f"{path}: notches grafted {sorted(counts)} requests, so these cannot be drawn together")
        losses = np.array([np.zeros(counts.pop()), *grafted])
        return cls(loss, notches, losses, not loss.startswith("kl"))

    @property
    def risks(self) -> NDArray[np.float64]:
        """True risk of each notch."""
        return self.losses.mean(1)


def calibrated(traffic: Traffic, size: int, epsilon: float, delta: float, *, rng: np.random.Generator) -> int:
    """Calibrate on `size` requests; returns the index of the notch."""
    drawn = traffic.losses[1:, rng.integers(0, traffic.losses.shape[1], size)]
    samples = [LossSample(size, float(losses.sum()), traffic.is_binary) for losses in drawn]
    return fixed_sequence([sample.p_value(epsilon) for sample in samples], delta)


def served(
    traffic: Traffic, controller: RiskController, num_requests: int, *, rng: np.random.Generator
) -> tuple[float, set[RiskEvent]]:
    """Serve and audit; returns the mean loss of what was served, and what happened."""
    total, events = 0.0, set()
    for request in rng.integers(0, traffic.losses.shape[1], num_requests):
        notch = controller.notch("any")
        loss = float(traffic.losses[notch, request])
        total += loss
        event = controller.audit("any", notch, loss)
        if event is not None:
            events.add(event)
    return total / num_requests, events


@dataclass(frozen=True)
class Plan:
    """What is tried.

    Attributes:
        delta: Probability of being wrong that is allowed.
        streams: Calibrations, each with a stream.
        served: Requests of a stream.
    """

    delta: float
    streams: int
    served: int


def row(traffic: Traffic, plan: Plan, size: int, epsilon: float, *, rng: np.random.Generator) -> dict[str, Any]:
    """What calibrations of one size and their streams did."""
    target = RiskTarget(traffic.loss, epsilon, plan.delta, traffic.notches)
    picked = np.array([calibrated(traffic, size, epsilon, plan.delta, rng=rng) for _ in range(plan.streams)])
    streams = [
        served(traffic, RiskController(target, int(notch)), plan.served, rng=rng) for notch in picked if notch > 0
    ]
    held = traffic.risks[picked]
    alarms = {RiskEvent.TIGHTENED, RiskEvent.SWITCHED_OFF}
    return {
        "epsilon": epsilon,
        "prompts": size,
        "certified_wrongly": float((held > epsilon).mean()),
        "nothing_certified": float((picked == 0).mean()),
        "mean_risk": float(held[picked > 0].mean()) if streams else None,
        "notches": {traffic.notches[notch]: float((picked == notch).mean()) for notch in np.unique(picked)},
        "served_loss": float(np.mean([loss for loss, _ in streams])) if streams else None,
        "served_over_epsilon": float(np.mean([loss > epsilon for loss, _ in streams])) if streams else None,
        "alarmed": float(np.mean([bool(events & alarms) for _, events in streams])) if streams else None,
        "certified_by_audits": float(np.mean([RiskEvent.CERTIFIED in events for _, events in streams]))
        if streams
        else None,
    }


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("losses", type=Path, help="output of 'kvgraft calibrate --json'")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--served", type=int, default=1_000, help="requests per stream, all of them audited")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 150, 300])
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    traffic, rng = Traffic.read(args.losses), np.random.default_rng(args.seed)
    risks = dict(zip(traffic.notches, traffic.risks.tolist(), strict=True))
    plan = Plan(args.delta, args.streams, args.served)
    rows = [row(traffic, plan, size, epsilon, rng=rng) for epsilon in args.epsilon for size in args.prompts]
    result = {
        "loss": traffic.loss,
        "requests": traffic.losses.shape[1],
        "delta": args.delta,
        "seed": args.seed,
        "streams": args.streams,
        "served": args.served,
        "true_risk": risks,
        "rows": rows,
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"{traffic.loss}, {traffic.losses.shape[1]} requests; true risk: {text_of(risks)}")
    for each in rows:
        print("  ".join(f"{key} {text_of(value)}" for key, value in each.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
