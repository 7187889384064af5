"""The settings of a selection policy in order of boldness. A calibration picks one, audits may tighten it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.graft.select import FirstK, NoRecompute
from kvgraft.graft.select.ratio import RatioPolicy

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
        name: As reports and files tell it.
        policy: The policy so set; None where nothing is grafted.
    """

    name: str
    policy: SelectionPolicy | None


def notches_of(policy: SelectionPolicy) -> tuple[Notch, ...]:
    """Return the notches of a policy from "full" to "none", each bolder than the one before.

    Its own share, or number of tokens, does not matter: the notches have theirs. Policies without either have one in between,
    as they are.
    """
    if isinstance(policy, RatioPolicy):
        between = [
            Notch(f"{ratio:.0%}".replace("%", " %"), dataclasses.replace(policy, ratio=ratio)) for ratio in _RATIOS
        ]
    elif isinstance(policy, FirstK):
        between = [Notch(f"first {k}", dataclasses.replace(policy, k=k)) for k in _FIRST]
    elif isinstance(policy, NoRecompute):
        between = []
    else:
        between = [Notch(policy.name, policy)]
    return (Notch(FULL, None), *between, Notch("none", NoRecompute()))
