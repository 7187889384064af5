"""Risk asked against risk held, on simulated streams: calibrations of many samples, then controllers under drift.

    python benchmarks/bench_risk.py [--streams 400] [--audits 20000] [--json]

No model: whether a request is a loss is drawn with a known risk, so that a wrong statement is seen.
`calibrate` draws a sample of prompts per stream and setting, picks the setting by Learn then Test and holds its true risk
against epsilon. `crossings` counts the audits until a certificate or an alarm. `streams` lets the shipped controller serve: a
calibration picks the setting, in the middle of the stream the risk of every setting is multiplied, and what was served is
compared with epsilon.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.fidelity.control import (
    OFF,
    EProcess,
    RiskController,
    RiskEvent,
    RiskTarget,
    clopper_pearson,
    fixed_sequence,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTCHES = ("full", "50 %", "25 %", "10 %", "5 %", "none")
PROFILES = {
    "falling": (0.0, 0.001, 0.004, 0.012, 0.025, 0.06),
    "just above at once": (0.0, 0.021, 0.025, 0.03, 0.04, 0.06),
    "not monotone": (0.0, 0.002, 0.024, 0.01, 0.015, 0.05),
}
"""True risk of each notch."""
SAMPLES = (100, 150, 300, 1_000, 3_000)
DRIFTS = (1.0, 2.0, 5.0, 20.0)


def calibrations(
    epsilon: float, delta: float, num_streams: int, *, rng: np.random.Generator
) -> list[dict[str, object]]:
    """Return a row per profile and sample size: how often the picked notch is riskier than epsilon, and how risky it is."""
    rows = []
    for name, risks in PROFILES.items():
        for size in SAMPLES:
            picked = np.array([pick(risks, size, epsilon, delta, rng=rng) for _ in range(num_streams)])
            held = np.array(risks)[picked]
            rows.append(
                {
                    "profile": name,
                    "prompts": size,
                    "wrong": float(np.mean(held > epsilon)),
                    "nothing_certified": float(np.mean(picked == OFF)),
                    "mean_risk": float(held.mean()),
                    "notches": {NOTCHES[notch]: float(np.mean(picked == notch)) for notch in np.unique(picked)},
                }
            )
    return rows


def pick(risks: Sequence[float], size: int, epsilon: float, delta: float, *, rng: np.random.Generator) -> int:
    """Calibrate on a sample of `size` prompts per notch; returns the index of the boldest notch that is certified."""
    losses = rng.binomial(size, risks[1:])
    return fixed_sequence([clopper_pearson(int(count), size, epsilon) for count in losses], delta)


def crossings(
    epsilon: float, delta: float, num_streams: int, num_audits: int, *, rng: np.random.Generator
) -> list[dict[str, object]]:
    """Return a row per process and true risk: audits until it crosses, and how many streams never do."""
    rows = []
    for kind, begin, risks in (
        ("certify", EProcess.certificate, (0.0, 0.1, 0.25, 0.5, 1.0)),
        ("alarm", EProcess.alarm, (1.0, 1.5, 2.5, 5.0, 15.0)),
    ):
        for ratio in risks:
            draws = (rng.random(num_streams) < ratio * epsilon for _ in range(num_audits))
            first = first_crossings(begin(epsilon), delta, draws, num_streams)
            reached = first[first <= num_audits]
            rows.append(
                {
                    "process": kind,
                    "risk": ratio * epsilon,
                    "share": len(reached) / num_streams,
                    "median": float(np.median(first)) if len(reached) * 2 > num_streams else None,
                    "p90": float(np.quantile(first, 0.9)) if len(reached) > 0.9 * num_streams else None,
                }
            )
    return rows


def first_crossings(process: EProcess, delta: float, draws: Iterable[np.ndarray], num_streams: int) -> np.ndarray:
    """At which audit each stream reaches `1 / delta`; one more than there are where it does not."""
    first = np.zeros(num_streams, np.int64)
    for number, losses in enumerate(draws, 1):
        process.update(losses)
        first[(first == 0) & (process.log_e >= -math.log(delta))] = number
    first[first == 0] = process.num_losses + 1
    return first


def controlled(
    epsilon: float, delta: float, num_streams: int, num_audits: int, *, rng: np.random.Generator
) -> list[dict[str, object]]:
    """Return a row per drift: what the controller serves of a stream that begins calibrated, then becomes riskier."""
    risks = np.array(PROFILES["falling"])
    target = RiskTarget("first_token", epsilon, delta, NOTCHES)
    rows = []
    for factor in DRIFTS:
        streams = [
            stream(
                RiskController(target, pick(risks, 1_000, epsilon, delta, rng=rng)), risks, factor, num_audits, rng=rng
            )
            for _ in range(num_streams)
        ]
        events = [[event for _, event in found] for _, found in streams]
        delays = [
            found[0][0] - num_audits // 2 for _, found in _alarms(streams) if found and found[0][0] > num_audits // 2
        ]
        rows.append(
            {
                "drift": factor,
                "mean_risk_before": float(np.mean([held[0] for held, _ in streams])),
                "mean_risk_after": float(np.mean([held[1] for held, _ in streams])),
                "risk_at_end": float(np.mean([held[2] for held, _ in streams])),
                "uncontrolled_after": float(np.mean([held[3] for held, _ in streams])),
                "certified": float(np.mean([RiskEvent.CERTIFIED in found for found in events])),
                "alarmed_before": float(
                    np.mean([any(number <= num_audits // 2 for number, _ in found) for _, found in _alarms(streams)])
                ),
                "alarmed_after": len(delays) / num_streams,
                "audits_to_alarm": float(np.median(delays)) if delays else None,
                "switched_off": float(np.mean([RiskEvent.SWITCHED_OFF in found for found in events])),
            }
        )
    return rows


Held = tuple[float, float, float, float]
Events = list[tuple[int, RiskEvent]]


def _alarms(streams: Sequence[tuple[Held, Events]]) -> list[tuple[Held, Events]]:
    return [(held, [each for each in found if each[1] is not RiskEvent.CERTIFIED]) for held, found in streams]


def stream(
    controller: RiskController, risks: np.ndarray, factor: float, num_audits: int, *, rng: np.random.Generator
) -> tuple[Held, Events]:
    """Serve one stream, every request of it audited; drift begins in its middle.

    Returns:
        Mean true risk of what was served before and after the drift, at the end, and after it had nothing been controlled;
        and the events with the number of their audit.
    """
    events, served = [], np.zeros(num_audits)
    drawn = rng.random(num_audits)
    start = controller.start
    for number in range(num_audits):
        notch = controller.notch("any")
        risk = min(1.0, risks[notch] * (factor if number >= num_audits // 2 else 1.0))
        served[number] = risk
        event = controller.audit("any", notch, float(drawn[number] < risk))
        if event is not None:
            events.append((number + 1, event))
    middle = num_audits // 2
    held = (served[:middle].mean(), served[middle:].mean(), served[-1], min(1.0, risks[start] * factor))
    return tuple(map(float, held)), events  # type: ignore[return-value]


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--audits", type=int, default=20_000, help="per stream, for crossings")
    parser.add_argument("--served", type=int, default=4_000, help="audits per stream, for the controller")
    parser.add_argument("--epsilon", type=float, default=0.02)
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    result = {
        "epsilon": args.epsilon,
        "delta": args.delta,
        "seed": args.seed,
        "num_streams": args.streams,
        "calibrate": calibrations(args.epsilon, args.delta, args.streams, rng=rng),
        "crossings": crossings(args.epsilon, args.delta, args.streams, args.audits, rng=rng),
        "streams": controlled(args.epsilon, args.delta, args.streams, args.served, rng=rng),
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    for name in ("calibrate", "crossings", "streams"):
        print(name)
        for row in result[name]:
            print("  " + "  ".join(f"{key} {text_of(value)}" for key, value in row.items()))
    return 0


def text_of(value: object) -> str:
    """Show a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text_of(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
