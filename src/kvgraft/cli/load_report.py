"""Output of `kvgraft bench serve`: lines while and after it measures, and its JSON."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.rates import SustainedRate
    from kvgraft.bench.serve import AnswerCheck, LoadTest
    from kvgraft.bench.summary import RunSummary

_PACKAGES = ("kvgraft", "numpy", "torch", "transformers", "starlette", "uvicorn", "aiohttp")
_LATE_MS = 50.0
_SHORT_SECONDS = 10.0


class LoadReport:
    """Writes a table line by line as runs end.

    Args:
        test: Gives workload and settings.
        out: Where the table goes.
    """

    def __init__(self, test: LoadTest, out: TextIO) -> None:
        self._test = test
        self._out = out

    def print_head(self, checks: Mapping[str, AnswerCheck]) -> None:
        """Say what is about to be measured, and how far answers are the same."""
        workload, settings = self._test.workload, self._test.settings
        arrivals = "a Poisson process" if workload.times is None else "the pack's arrivals, scaled to the rate"
        self._line(
            f"{workload.name}: {len(workload.prompts)} prompts, {arrivals}, {settings.max_tokens} output tokens each"
        )
        for names, description in self._servers():
            self._line(f"{names}{description}; {settings.warmup} requests sent before measuring")
        for name, check in checks.items():
            failure = "" if check.failure is None else f"; {check.failure}"
            self._line(
                f"greedy answers of {name} that are those of {next(iter(self._test.sides))}: {check.num_equal} of "
                f"{check.num_asked}{failure}"
            )
        width = self._width
        self._line(
            f"\n{'load':>7s}  {'side':{width}s}{'served':>10s}{'done/s':>8s}{'tok/s':>8s}{'TTFT p50':>11s}"
            f"{'p95':>10s}{'p99':>10s}{'gap p50':>10s}{'p99':>10s}{'reused':>8s}{'kept up':>9s}{'lag p99':>10s}"
        )

    def _servers(self) -> list[tuple[str, str]]:
        """Return descriptions of servers, with the sides that each is where there are several servers."""
        found: dict[str, list[str]] = {}
        for name, side in self._test.sides.items():
            found.setdefault(side.target.description, []).append(name)
        return [("" if len(found) == 1 else f"{', '.join(names)}: ", text) for text, names in found.items()]

    @property
    def _width(self) -> int:
        return max(6, *(len(name) + 1 for name in self._test.sides))

    def print_run(self, run: RunSummary) -> None:
        """Print the line of a run."""
        times = (
            f"{_ms(run.ttft_ms, 'p50'):>11s}{_ms(run.ttft_ms, 'p95'):>10s}{_ms(run.ttft_ms, 'p99'):>10s}"
            f"{_ms(run.gap_ms, 'p50', 1):>10s}{_ms(run.gap_ms, 'p99', 1):>10s}"
        )
        self._line(
            f"{run.load!s:>7s}  {run.mode:{self._width}s}{f'{run.completed}/{run.planned}':>10s}"
            f"{run.requests_per_s:>8.2f}{run.tokens_per_s:>8.0f}{times}"
            f"{run.reused_share:>8.0%}{run.kept_up:>9.0%}{_ms(run.client_lag_ms, 'p99', 1):>10s}{_remarks(run)}"
        )

    def print_result(
        self,
        runs: Sequence[RunSummary],
        sustained: Sequence[SustainedRate],
        slo_ttft_ms: float | None,
        *,
        is_given: bool,
    ) -> None:
        """Print what every mode sustains, and what makes the figures less than certain."""
        if any(run.clients for run in runs):
            self._line("")
            for line in _ratios(runs):
                self._line(line)
        else:
            self._print_sustained(sustained, slo_ttft_ms, is_given=is_given)
        for note in self._notes(runs):
            self._line(f"note: {note}")

    def _print_sustained(
        self, sustained: Sequence[SustainedRate], slo_ttft_ms: float | None, *, is_given: bool
    ) -> None:
        if slo_ttft_ms is None:
            self._line(
                "\nno limit of time to first token: off was stable at no rate; begin lower or give --slo-ttft-ms"
                if "off" in self._test.sides
                else "\nno limit of time to first token: no server is named off; give --slo-ttft-ms"
            )
            return
        origin = "given" if is_given else "what off shows at the highest rate at which it is stable"
        self._line(f"\nsustained with p95 TTFT within {slo_ttft_ms:.0f} ms ({origin}):")
        for mode in sustained:
            self._line(_sustained_line(mode))

    def as_dict(
        self,
        settings: Mapping[str, object],
        checks: Mapping[str, AnswerCheck],
        runs: Sequence[RunSummary],
        sustained: Sequence[SustainedRate],
        slo_ttft_ms: float | None,
    ) -> dict[str, object]:
        """Return everything that was measured and what is needed to repeat it."""
        workload = self._test.workload
        return {
            "settings": dict(settings),
            "workload": {
                "name": workload.name,
                "prompts": len(workload.prompts),
                "skipped": workload.skipped,
                "recorded_arrivals": workload.times is not None,
            },
            "sides": {name: side.target.description for name, side in self._test.sides.items()},
            "checks": {name: dataclasses.asdict(check) for name, check in checks.items()},
            "server": self._test.server,
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
            "machine": {"cores": os.cpu_count(), "architecture": platform.machine()},
            "slo_ttft_ms": slo_ttft_ms,
            "sustained": [dataclasses.asdict(mode) for mode in sustained],
            "runs": [dataclasses.asdict(run) | {"stable": run.stable} for run in runs],
            "rows": self._test.rows,
        }

    def _notes(self, runs: Sequence[RunSummary]) -> list[str]:
        notes = []
        workload = self._test.workload
        if workload.skipped:
            notes.append(f"{workload.skipped} prompts were left out because they are too long")
        late = [run for run in runs if run.client_lag_ms.get("p99", 0.0) > _LATE_MS]
        if late:
            notes.append(f"the client sent late in {len(late)} runs (p99 above {_LATE_MS:.0f} ms); it was short of CPU")
        short = [run for run in runs if run.planned > 1 and not run.clients and run.arrival_s < _SHORT_SECONDS]
        if short:
            notes.append(
                f"{len(short)} runs have less than {_SHORT_SECONDS:.0f} s of arrivals; "
                "a growing queue may not show: raise --duration or take a larger pack"
            )
        return notes

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _ratios(runs: Sequence[RunSummary]) -> list[str]:
    """Return a line for each number of clients: requests per second of each side, in times of the first one's."""
    lines = []
    for clients in dict.fromkeys(run.clients for run in runs):
        first, *others = (run for run in runs if run.clients == clients)
        parts = [
            f"{other.mode} {other.requests_per_s / first.requests_per_s:.2f}x" for other in others if first.completed
        ]
        if parts:
            lines.append(f"c={clients}: requests/s in times of {first.mode}'s: {', '.join(parts)}")
    return lines


def _sustained_line(mode: SustainedRate) -> str:
    if not mode.rate:
        return f"  {mode.mode:6s} none of the measured rates"
    least = "at least " if mode.at_least else ""
    ratio = "" if mode.ratio is None else f", {mode.ratio:.2f}x off"
    irregular = "  (though not a lower one: repeat, or longer runs)" if mode.irregular else ""
    return f"  {mode.mode:6s} {least}{mode.rate:.3g} requests/s{ratio}, p95 TTFT {mode.p95_ttft_ms:.0f} ms{irregular}"


def _remarks(run: RunSummary) -> str:
    remarks = [f"{count} {kind}" for kind, count in run.failures.items()]
    if run.gave_up is not None:
        remarks.append(f"saturated: {run.gave_up}")
    return "  " + "; ".join(remarks) if remarks else ""


def _ms(times: Mapping[str, float], name: str, digits: int = 0) -> str:
    return f"{times[name]:.{digits}f} ms" if name in times else "-"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
