"""Drift correction: measure how a run's reused K/V moved by its recomputed tokens, and move the rest likewise.

A reused run was encoded after other text, so its keys and values differ from those of a full prefill. A good part of the
difference is the same for all tokens of the run: one shift per layer and K/V head. Tokens that a policy computes again show
it, new value minus reused value; added to the tokens that are not computed it costs no forward pass. Three stages, pure
tensors, no model:

1. *measure*: the movement of the sampled tokens, keys in the frame of their own position or all turned back to position 0;
2. *estimate* (`drift_estimate.DriftEstimator`, with what `drift_layout.RunLayout` forms once for all layers): a shift for
   every token that stays, shrunk by the part of the sample that may be noise;
3. *apply*: keys turned to their positions again, added in float32, rounded once.

An estimator must return no shift where no movement was measured. A pass that is run again after a failure finds its own K/V
in the slots, measures nothing, and must not correct twice. For the same reason several passes over one prompt (nested
budgets) are well defined: each measures against the present K/V in the slots, and adds what earlier ones left.

Sources: AgentKVShift, https://arxiv.org/abs/2607.21604, published the decomposition first: an offset that tokens of a text
share, which recomputed probes show, and noise. Shrinkage: James and Stein, 1961. docs/adr/0006-drift-correction.md has the
reasons for each choice, and how estimators compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from kvgraft.errors import ConfigError
from kvgraft.graft.drift_estimate import DriftEstimator, KernelRidge, ReusedKV

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.graft.drift_layout import RunLayout, Turns
    from kvgraft.graft.rope import RopeSpec


class KeyFrame(StrEnum):
    """The frame in which movements of keys are compared."""

    OWN_POSITION = "own_position"
    """As in the cache, each rotated to its own position."""
    COMMON = "common"
    """All turned back to position 0: only there is a shift before RoPE the same for every token."""


@dataclass(frozen=True)
class DriftCorrection:
    """Measurement of drift and its removal, from layer `first_layer` on: K/V of layer 0 depend on the token alone.

    `version` is raised when the same fields correct otherwise than before: a calibration holds for one version.
    """

    version: ClassVar[int] = 3  # from 3 on what moves repeated tokens alike is hardly shrunk

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
        """Return keys and values of the tokens that stay, corrected; nothing is changed in place.

        What is returned has their dtype, float32 if they have 8 bits, and may lie in memory that the next layer overwrites.

        Args:
            layout: Runs and positions of the tokens.
            new: Computed keys and values of the sampled tokens, each (num_sampled, heads, head_dim).
            reused: Reused ones of the same tokens.
            rest: Keys and values of the tokens that stay, each (num_rest, heads, head_dim).
            rope: Rotation of keys; None for a layer without RoPE.
        """
        turns = layout.turns(rope if self.key_frame is KeyFrame.COMMON else None)
        shift = self.estimator.for_layer(layout, self._kept(turns, reused, rest))
        keys, values = rest
        if self.keys:
            moved = turns.sample_back(new[0].float() - reused[0].float())
            found = shift(moved, layout.buffer("key shifts", *keys.shape))
            keys = _add(keys, turns.rest_forth(found, layout.buffer("turned shifts", *keys.shape)))
        if self.values:
            moved = new[1].float() - reused[1].float()
            values = _add(values, shift(moved, layout.buffer("value shifts", *values.shape)))
        return keys, values

    def _kept(self, turns: Turns, reused: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor]) -> ReusedKV | None:
        """Return the reused K/V in the frame of comparison, for estimators that need them."""
        if not self.estimator.needs_reused:
            return None
        sampled = turns.sample_back(reused[0].float()), reused[1].float()
        return ReusedKV(sampled, (turns.rest_back(rest[0].float()), rest[1].float()))


CORRECTIONS: dict[str, DriftCorrection | None] = {"none": None, "drift": DriftCorrection()}
"""Values of the setting `correction`."""


def drift_correction(name: str) -> DriftCorrection | None:
    """Return the correction called `name`; raises `ConfigError` that lists what exists."""
    if name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {name!r}; choose {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name]


def _add(rest: Tensor, shift: Tensor) -> Tensor:
    """Return the sum, in the memory of the float32 `shift` if `rest` has the same dtype; of 8-bit numbers in float32."""
    return shift.add_(rest.float()) if rest.itemsize == 1 else shift.add_(rest).to(rest.dtype)
