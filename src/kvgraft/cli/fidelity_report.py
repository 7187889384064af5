"""Output of `kvgraft bench fidelity`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.fidelity.rows import CONTROLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.fidelity.run import SuitePlan

    Row = Mapping[str, Any]


def print_sample(plans: Sequence[SuitePlan], num_known: int, longest: int) -> None:
    """Say what is about to be measured."""
    for plan in plans:
        skipped = f", {plan.sample.too_long} longer than {longest} tokens skipped" if plan.sample.too_long else ""
        print(f"{plan.suite.name}: {len(plan.sample.indices)} of {len(plan.requests)} requests{skipped}")
    if num_known:
        print(f"going on after {num_known} requests that have been measured")
    print()


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line per suite and setting; nothing stands where nothing was measured."""
    width = max(8, *(len(row["setting"]) for row in rows))
    names = max(7, *(len(row["suite"]) for row in rows))
    print(
        f"{'suite':{names}s}{'setting':>{width + 1}s}{'n':>5s}{'recomp':>8s}{'FLOPs':>7s}{'KL':>9s}{'95 %':>17s}"
        f"{'median':>9s}{'worst':>8s}{'KL1':>8s}{'flip':>6s}{'top-1':>7s}{'greedy':>8s}{'NLL':>8s}"
        f"{'task off/on':>13s}{'stale off/on':>14s}"
    )
    for row in rows:
        shares = f"{_percent(row['recomputed_share']):>8s}{_percent(row['flops_share'], 0):>7s}"
        low, high = row["ci"].get("mean_kl", (None, None))
        interval = "" if low is None else f"{low:.4f}-{high:.4f}"
        errors = f"{_number(row['mean_kl']):>9s}{interval:>17s}{_number(row['median_kl']):>9s}"
        errors += f"{_number(row['worst_tenth_kl'], 3):>8s}{_number(row['first_kl']):>8s}"
        agreement = (
            f"{_percent(row['first_flip'], 0):>6s}{_percent(row['top1']):>7s}{_percent(row['greedy_equal'], 0):>8s}"
        )
        answers = f"{_number(row['gold_nll_delta'], 3, '+'):>8s}{_pair(row, 'task'):>13s}{_pair(row, 'stale'):>14s}"
        print(
            f"{row['suite']:{names}s}{row['setting']:>{width + 1}s}{row['n']:>5d}{shares}{errors}{agreement}{answers}"
        )
    print()
    for row in {row["suite"]: row for row in reversed(rows)}.values():
        print(
            f"{row['suite']}: something was grafted for {row['n']} of {row['requests']} requests; "
            f"{row['reused_share']:.0%} of all prompt tokens reused under {row['setting']}"
        )


def print_controls(rows: Sequence[Row]) -> None:
    """Print what must be next to nothing, and the noise floor."""
    for row in rows:
        what = CONTROLS[row["control"]]
        print(
            f"{row['suite']}: control {what} ({row['n']}): KL {row['mean_kl']:.2g}, first token {row['first_kl']:.2g}, "
            f"greedy equal {row['greedy_equal']:.0%}"
        )


def _number(value: float | None, digits: int = 4, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def _pair(row: Row, name: str) -> str:
    off, on = row[f"{name}_off"], row[f"{name}_on"]
    return "-" if off is None or on is None else f"{off:.3f}/{on:.3f}"
