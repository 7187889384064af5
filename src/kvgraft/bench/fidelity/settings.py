"""What is compared: policies with their budget and their correction, as they are named on the command line.

NAME[:RATIO][+CORRECTION]      query_seam, query_seam:0.1, query_seam:0.1+drift, first_k:32 (tokens per run), none, default

Beside the engine's policies there is `oracle`, which is shown what only a full prefill knows (`deviation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError
from kvgraft.graft.drift import CORRECTIONS
from kvgraft.graft.select import SELECTION_POLICIES, FirstK, RatioPolicy, SelectionPolicy
from kvgraft.graft.select.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT, NO_CORRECTION = "default", "none"
POLICIES: dict[str, type[SelectionPolicy]] = {**SELECTION_POLICIES, Oracle.name: Oracle}


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to choose and correct.

    Attributes:
        policy: Chooses what is computed again.
        correction: What is done to the rest.
        budget: Share of reused tokens that the policy was given, None for policies that take none.
    """

    policy: SelectionPolicy
    correction: str = NO_CORRECTION

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
        return policy + ratio + plus + correction

    @property
    def name(self) -> str:
        """Policy and correction, without the budget."""
        return self.policy.name + ("" if self.correction == NO_CORRECTION else f"+{self.correction}")


def parse_settings(
    specs: Sequence[str], budgets: Sequence[float], default: SelectionPolicy, default_correction: str = NO_CORRECTION
) -> list[Setting]:
    """Return every setting once, cheapest first: ratio policies with every budget, others once.

    Args:
        specs: As on the command line.
        budgets: Of ratio policies that name none; where there are none, the policy's own.
        default: The engine's policy.
        default_correction: The engine's correction.

    Raises:
        ConfigError: A name is unknown or a number out of range.
    """
    found: dict[str, Setting] = {}
    for spec in specs:
        for setting in _parse(spec, budgets, default, default_correction):
            found.setdefault(setting.label, setting)
    return sorted(found.values(), key=lambda setting: setting.policy.recompute_ratio)


def _parse(spec: str, budgets: Sequence[float], default: SelectionPolicy, default_correction: str) -> list[Setting]:
    rest, plus, correction = spec.partition("+")
    name, colon, ratio = rest.partition(":")
    if spec == DEFAULT:
        return [Setting(default, default_correction)]
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError(
            f"unknown policy {name!r}; choose {', '.join((DEFAULT, *POLICIES))}, as NAME[:RATIO][+CORRECTION]"
        )
    correction = correction if plus else NO_CORRECTION
    if correction not in CORRECTIONS:
        raise ConfigError(f"unknown correction {correction!r} in {spec!r}; choose {', '.join(CORRECTIONS)}")
    if colon and kind is FirstK:
        return [Setting(FirstK(_count(ratio, spec)), correction)]
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


def _count(text: str, spec: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r} in {spec!r} is no number of tokens; give one such as 16")
    return int(text)
