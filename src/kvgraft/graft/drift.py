"""Drift correction: read off the recomputed tokens of a run how its reused K/V moved, and move the rest likewise.

A reused run was encoded behind other text, so its keys and values differ from those of a full prefill. A good part of the
difference is the same for all tokens of the run: one shift per layer and K/V head. Tokens that a policy computes again show
it, new value minus reused value; added to the tokens that are not computed it costs no forward pass. Three stages, pure
tensors, no model:

1. *measure*: what the sampled tokens moved by, keys in the frame of their own position or all turned back to position 0;
2. *estimate* (`drift_estimate.DriftEstimator`, with what `drift_layout.RunLayout` forms once for all layers): a shift for
   every token that stays, shrunk by what the sample cannot tell from noise;
3. *apply*: keys turned to their positions again, added in float32, rounded once.

What an estimator must keep: no movement measured gives no shift. A pass that is run again after a failure finds its own K/V
in the slots, measures nothing, and must not correct twice. For the same reason several passes over one prompt (nested
budgets) are well defined: each measures against what lies in the slots now, so a later one adds what the earlier ones left.

Source of the shrinkage: James and Stein, 1961. That the shift is read off recomputed tokens we found nowhere published;
docs/adr/0006-drift-correction.md has the reasons for each choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgraft.errors import ConfigError
from kvgraft.graft.drift_estimate import DriftEstimator, KernelRidge, ReusedKV

if TYPE_CHECKING:
    from kvgraft.graft.drift_estimate import Shift
    from kvgraft.graft.drift_layout import RunLayout
    from kvgraft.graft.rope import RopeSpec


class KeyFrame(StrEnum):
    """In which frame the movements of keys are compared."""

    OWN_POSITION = "own_position"
    """As they lie in the cache, each rotated to its own position."""
    COMMON = "common"
    """All turned back to position 0: a shift in front of RoPE is the same for every token there only."""


@dataclass(frozen=True)
class DriftCorrection:
    """How drift is measured and taken away.

    Attributes:
        estimator: From movements to shifts.
        key_frame: In which frame movements of keys are compared.
        keys: Whether keys are corrected.
        values: Whether values are.
        first_layer: Layers in front of it are left alone. K/V of layer 0 depend on the token alone and do not drift.
    """

    estimator: DriftEstimator = field(default_factory=KernelRidge)
    key_frame: KeyFrame = KeyFrame.COMMON
    keys: bool = True
    values: bool = True
    first_layer: int = 1

    def corrected(
        self,
        layout: RunLayout,
        new: tuple[Tensor, Tensor],
        reused: tuple[Tensor, Tensor],
        rest: tuple[Tensor, Tensor],
        rope: RopeSpec | None,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the tokens that stay, corrected, in their own dtype; nothing is changed in place.

        Args:
            layout: Which token belongs to which run, and where it stands.
            new: Keys and values of the sampled tokens as computed, each (num_sampled, heads, head_dim).
            reused: The same tokens' as they were reused.
            rest: Keys and values of the tokens that stay, each (num_rest, heads, head_dim).
            rope: How keys rotate; None for a layer without RoPE.
        """
        turns = layout.turns(rope if self.key_frame is KeyFrame.COMMON else None)
        before = turns.sample_back(reused[0].float()), reused[1].float()
        kept = None
        if self.estimator.needs_reused:
            kept = ReusedKV(before, (turns.rest_back(rest[0].float()), rest[1].float()))
        shift = self.estimator.for_layer(layout, kept)
        keys, values = rest
        moved = turns.sample_back(new[0].float()) - before[0], new[1].float() - before[1]
        key_shift, value_shift = self._shifts(shift, *moved)
        if key_shift is not None:
            keys = _add(keys, turns.rest_forth(key_shift))
        if value_shift is not None:
            values = _add(values, value_shift)
        return keys, values

    def _shifts(self, shift: Shift, keys: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Those of keys and values, in one piece where they are alike: half as many passes over the weights."""
        if self.keys and self.values and keys.shape == values.shape:
            both = shift(torch.cat([keys, values], dim=1))
            return both[:, : keys.shape[1]], both[:, keys.shape[1] :]
        return shift(keys) if self.keys else None, shift(values) if self.values else None


CORRECTIONS: dict[str, DriftCorrection | None] = {"none": None, "drift": DriftCorrection()}
"""What the setting `correction` names."""


def drift_correction(name: str) -> DriftCorrection | None:
    """Return the correction called `name`; raises `ConfigError` that lists what exists."""
    if name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {name!r}; choose {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name]


def _add(rest: Tensor, shift: Tensor) -> Tensor:
    """The sum, in the memory of the float32 `shift` where that is the type of `rest`, too."""
    return shift.add_(rest).to(rest.dtype)
