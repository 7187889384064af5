"""The settings of a selection policy in order of boldness. A calibration picks one, audits may tighten it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.graft.select import FirstK, NoRecompute
from kvgraft.graft.select.ratio import RatioPolicy
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from kvgraft.graft.select import SelectionPolicy

FULL = "full"
"""The notch at which nothing is grafted."""
_RATIOS = (0.5, 0.25, 0.1, 0.05)
_FIRST = (128, 64, 32, 16, 8)


@dataclass(frozen=True, slots=True)
class Notch:
    """One setting of a policy.

    Attributes:
        name: As in reports and files.
        policy: The policy so set; None where nothing is grafted.
        repair: When its choice is computed; a request may wait for it where it need not.
    """

    name: str
    policy: SelectionPolicy | None
    repair: RepairTime = RepairTime.BEFORE


def notches_of(policy: SelectionPolicy, repair: RepairTime) -> tuple[Notch, ...]:
    """Return the notches of a policy from "full" to "none", each bolder than the one before.

    Its own share, or number of tokens, does not matter: the notches have theirs. Policies without either have one in between,
    as they are. Where the choice is computed after the first token, that token is the same at all of these; so the most
    conservative of them has a notch before it that computes the same choice before the first token.
    """
    between = _settings_of(policy)
    none = Notch("none", NoRecompute(), repair)
    if repair is RepairTime.BEFORE:
        return (Notch(FULL, None), *between, none)
    waiting = [dataclasses.replace(notch, name=f"{notch.name} before") for notch in between[:1]]
    after = [dataclasses.replace(notch, repair=repair) for notch in between]
    return (Notch(FULL, None), *waiting, *after, none)


def _settings_of(policy: SelectionPolicy) -> list[Notch]:
    """Return the notches between "full" and "none"."""
    if isinstance(policy, RatioPolicy):
        return [Notch(f"{ratio:.0%}".replace("%", " %"), dataclasses.replace(policy, ratio=ratio)) for ratio in _RATIOS]
    if isinstance(policy, FirstK):
        return [Notch(f"first {k}", dataclasses.replace(policy, k=k)) for k in _FIRST]
    return [] if isinstance(policy, NoRecompute) else [Notch(policy.name, policy)]
