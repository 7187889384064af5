"""Settings to compare: policies with their budget, correction and time of repair, as the command line names them.

NAME[:RATIO][+CORRECTION]      query_seam, query_seam:0.1, query_seam:0.1+drift, first_k:32 (tokens per run), none, default
  ...[@TIME[~MARGIN][:ROWS]]   query_seam:0.1+drift@after, @after~0.25 (first tokens below that margin wait),
                               @after:16 (rows per decode step)

A policy without a time repairs before the first token, `default` when the engine does.

Beside the engine's policies there is `oracle`, which is shown what only a full prefill knows (`deviation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.bench.fidelity.oracle import Oracle
from kvgraft.engine import RepairRules
from kvgraft.errors import ConfigError
from kvgraft.graft.drift import CORRECTIONS
from kvgraft.graft.select import FirstK, RatioPolicy, SelectionPolicy, policy_class, policy_names
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine import LLM

DEFAULT, NO_CORRECTION = "default", "none"
BEFORE = RepairRules()
POLICIES: dict[str, type[SelectionPolicy]] = {
    **{name: policy_class(name) for name in policy_names()},
    Oracle.name: Oracle,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to choose what is computed again and when, and to correct the rest.

    Attributes:
        policy: Chooses.
        correction: Name of the drift correction.
        repair: When the choice is computed, and what decode steps compute besides.
    """

    policy: SelectionPolicy
    correction: str = NO_CORRECTION
    repair: RepairRules = BEFORE

    @property
    def budget(self) -> float | None:
        """Share of reused tokens that the policy was given, None for policies that take none."""
        return self.policy.recompute_ratio if isinstance(self.policy, RatioPolicy) else None

    @property
    def label(self) -> str:
        """Name in tables, and in files that are resumed."""
        ratio = "" if self.budget is None else f":{self.budget:g}"
        if isinstance(self.policy, FirstK):
            ratio = f":{self.policy.k}"
        policy, plus, correction = self.name.partition("+")
        return policy + ratio + plus + correction + self._when

    @property
    def name(self) -> str:
        """Policy and correction, without the budget."""
        return self.policy.name + ("" if self.correction == NO_CORRECTION else f"+{self.correction}")

    @property
    def heals(self) -> bool:
        """Whether decode steps change K/V of the prompt, so that every token must be drawn in a step of its own."""
        return self.repair.rows_per_step > 0

    @property
    def _when(self) -> str:
        if self.repair.time is RepairTime.BEFORE:
            return ""
        margin = f"~{self.repair.below_margin:g}" if self.repair.below_margin else ""
        return f"@{self.repair.time}" + margin + (f":{self.repair.rows_per_step}" if self.heals else "")


def parse_settings(specs: Sequence[str], budgets: Sequence[float], default: Setting) -> list[Setting]:
    """Return every setting once, cheapest first: ratio policies with every budget, others once.

    Args:
        specs: As on the command line.
        budgets: Of ratio policies that name none; where there are none, the policy's own.
        default: The engine's own.

    Raises:
        ConfigError: A name is unknown or a number out of range.
    """
    found: dict[str, Setting] = {}
    for spec in specs:
        for setting in _parse(spec, budgets, default):
            found.setdefault(setting.label, setting)
    return sorted(found.values(), key=lambda setting: setting.policy.recompute_ratio)


def default_setting(llm: LLM) -> Setting:
    """Return the engine's own setting."""
    return Setting(llm.policy, llm.config.correction, RepairRules.configured(llm.config))


def _parse(spec: str, budgets: Sequence[float], default: Setting) -> list[Setting]:
    chosen, at, when = spec.partition("@")
    if at:
        rules = _rules(when, spec)
        own = replace(default, repair=rules)
        return [own] if chosen == DEFAULT else [replace(each, repair=rules) for each in _chosen(chosen, spec, budgets)]
    return [default] if spec == DEFAULT else _chosen(spec, spec, budgets)


def _rules(when: str, spec: str) -> RepairRules:
    """Return the rules that `TIME[~MARGIN][:ROWS]` names."""
    named, colon, rows = when.partition(":")
    time, tilde, margin = named.partition("~")
    if time not in set(RepairTime):
        raise ConfigError(f"unknown time {time!r} in {spec!r}; choose {', '.join(RepairTime)}, after the sign @")
    if (colon or tilde) and time != RepairTime.AFTER:
        raise ConfigError(
            f"{spec!r} names a margin, or rows per decode step: these go with a repair {RepairTime.AFTER} only"
        )
    below_margin = _ratio(margin, spec) if tilde else 0.0
    return RepairRules(RepairTime(time), below_margin, _count(rows, spec, "rows") if colon else 0)


def _chosen(chosen: str, spec: str, budgets: Sequence[float]) -> list[Setting]:
    """Return the settings that `NAME[:RATIO][+CORRECTION]` names."""
    rest, plus, correction = chosen.partition("+")
    name, colon, ratio = rest.partition(":")
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError(
            f"unknown policy {name!r}; choose {', '.join((DEFAULT, *POLICIES))}, as "
            "NAME[:RATIO][+CORRECTION][@TIME[~MARGIN][:ROWS]]"
        )
    correction = correction if plus else NO_CORRECTION
    if correction not in CORRECTIONS:
        raise ConfigError(f"unknown correction {correction!r} in {spec!r}; choose {', '.join(CORRECTIONS)}")
    if colon and kind is FirstK:
        return [Setting(FirstK(_count(ratio, spec, "tokens")), correction)]
    if not issubclass(kind, RatioPolicy):
        if colon:
            raise ConfigError(f"policy {name!r} takes no ratio; write it without {colon + ratio!r}")
        return [Setting(kind(), correction)]
    if colon:
        return [Setting(kind(ratio=_ratio(ratio, spec)), correction)]
    given: list[dict[str, float]] = [{"ratio": budget} for budget in budgets] or [{}]
    return [Setting(kind(**parameters), correction) for parameters in given]


def _ratio(text: str, spec: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} in {spec!r} is no ratio; give a number such as 0.1") from error


def _count(text: str, spec: str, what: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r} in {spec!r} is no number of {what}; give one such as 16")
    return int(text)
