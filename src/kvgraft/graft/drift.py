"""Drift correction: read off the recomputed tokens of a run how its reused K/V moved, and move the rest likewise.

A reused run was encoded behind other text, so its keys and values differ from those of a full prefill. A good part of the
difference is the same for all tokens of the run: one shift per layer and K/V head. Tokens that a policy computes again show
it, new value minus reused value; added to the tokens that are not computed it costs no forward pass. Three stages, pure
tensors, no model:

1. *measure*: what the sampled tokens moved by, keys in the frame of their own position or all turned back to position 0;
2. *estimate* (`DriftEstimator`): a shift for every token that stays, shrunk by what the sample cannot tell from noise;
3. *apply*: keys turned to their positions again, added in float32, rounded once.

What an estimator must keep: no movement measured gives no shift. A pass that is run again after a failure finds its own K/V
in the slots, measures nothing, and must not correct twice. For the same reason several passes over one prompt (nested
budgets) are well defined: each measures against what lies in the slots now, so a later one adds what the earlier ones left.

Source of the shrinkage: James and Stein, 1961. That the shift is read off recomputed tokens we found nowhere published;
docs/adr/0006-drift-correction.md has the reasons for each choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvgraft.errors import ConfigError
from kvgraft.graft.rope import RopeShift, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.graft.rope import RopeSpec


class KeyFrame(StrEnum):
    """In which frame the movements of keys are compared."""

    OWN_POSITION = "own_position"
    """As they lie in the cache, each rotated to its own position."""
    COMMON = "common"
    """All turned back to position 0: a shift in front of RoPE is the same for every token there only."""


@dataclass(frozen=True, slots=True, eq=False)
class DriftRun:
    """A run of reused tokens whose drift is read off some that are computed, and taken from the rest.

    Attributes:
        sample: int64, ascending positions of the computed tokens that stand for the run.
        rest: int64, ascending positions of those that keep what was reused.
    """

    sample: NDArray[np.int64]
    rest: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RunLayout:
    """The sampled and the remaining tokens of some runs of one prompt, run after run.

    Attributes:
        sample_run: int64 (num_sampled,), ascending: the run of each sampled token, from 0 on.
        rest_run: int64 (num_rest,), likewise of each token that stays.
        sample_positions: int64 (num_sampled,), prompt positions.
        rest_positions: int64 (num_rest,).
    """

    sample_run: Tensor
    rest_run: Tensor
    sample_positions: Tensor
    rest_positions: Tensor

    @classmethod
    def of(cls, runs: Sequence[DriftRun], device: torch.device) -> RunLayout:
        """Lay out `runs`, at least one, on `device`."""
        return cls(
            _run_of([len(run.sample) for run in runs], device),
            _run_of([len(run.rest) for run in runs], device),
            torch.cat([torch.from_numpy(run.sample) for run in runs]).to(device),
            torch.cat([torch.from_numpy(run.rest) for run in runs]).to(device),
        )

    def keep_rest(self, kept: Tensor) -> RunLayout:
        """The same runs with those of the remaining tokens for which `kept`, bool (num_rest,), is true."""
        return RunLayout(self.sample_run, self.rest_run[kept], self.sample_positions, self.rest_positions[kept])


class DriftEstimator(ABC):
    """Estimates the movement of tokens that stay from that of sampled ones. Frozen dataclasses; fields are parameters."""

    pools_runs: ClassVar[bool] = False
    """Whether a run's estimate uses the samples of others. All of them are computed in one piece then."""

    @abstractmethod
    def estimate(self, layout: RunLayout, moved: Tensor) -> Tensor:
        """Return the shift (num_rest, heads, head_dim), float32, of each token that stays.

        Args:
            layout: Which token belongs to which run.
            moved: float32 (num_sampled, heads, head_dim), new minus reused; where it is 0 the result must be 0.
        """


@dataclass(frozen=True)
class MeanShift(DriftEstimator):
    """One shift per run and head: the sample's mean, shrunk towards 0.

    Attributes:
        shrink: Multiply the mean by (signal - noise) / signal, not below 0, where the noise is the sample's variance over its
            size: what a mean of so few tokens shows where there is no drift at all.
    """

    shrink: bool = True

    def estimate(self, layout: RunLayout, moved: Tensor) -> Tensor:
        """See `DriftEstimator`. O(num_runs * num_sampled * heads * head_dim)."""
        num_runs = int(layout.sample_run[-1]) + 1
        members = torch.nn.functional.one_hot(layout.sample_run, num_runs).T.to(moved.dtype)
        count = members.sum(1)[:, None, None]
        mean = _summed(members, moved) / count
        if self.shrink:
            spread = (moved - mean[layout.sample_run]).square().sum(-1, keepdim=True)
            noise = _summed(members, spread) / (count - 1).clamp(min=1) / count
            signal = (mean.square().sum(-1, keepdim=True) - noise).clamp(min=0)
            mean = mean * signal / (signal + noise).clamp(min=torch.finfo(mean.dtype).tiny)
        return mean[layout.rest_run]


@dataclass(frozen=True)
class DriftCorrection:
    """How drift is measured and taken away.

    Attributes:
        estimator: From movements to shifts.
        key_frame: In which frame movements of keys are compared.
        keys: Whether keys are corrected.
        values: Whether values are.
        min_sample: Runs with fewer sampled tokens are left alone.
        first_layer: Layers in front of it are left alone. K/V of layer 0 depend on the token alone and do not drift.
    """

    estimator: DriftEstimator = field(default_factory=MeanShift)
    key_frame: KeyFrame = KeyFrame.OWN_POSITION
    keys: bool = True
    values: bool = True
    min_sample: int = 4
    first_layer: int = 1

    def __post_init__(self) -> None:
        if self.min_sample < 2:
            raise ConfigError(
                f"a drift correction needs min_sample >= 2, not {self.min_sample}: one token shows no spread"
            )

    def corrected_keys(
        self, layout: RunLayout, new: Tensor, reused: Tensor, rest: Tensor, rope: RopeSpec | None
    ) -> Tensor:
        """Return the keys of the tokens that stay, corrected, in their own dtype; nothing is changed in place.

        Args:
            layout: Which token belongs to which run, and where it stands.
            new: (num_sampled, heads, head_dim), keys of the sampled tokens as computed.
            reused: The same tokens' keys as they were reused.
            rest: (num_rest, heads, head_dim), keys of the tokens that stay.
            rope: How keys rotate; None for a layer without RoPE.
        """
        moved = new.float() - reused.float()
        if rope is None or self.key_frame is KeyFrame.OWN_POSITION:
            return _add(rest, self.estimator.estimate(layout, moved))
        moved = _rotated(moved, layout.sample_positions, torch.zeros_like(layout.sample_positions), rope)
        shift = self.estimator.estimate(layout, moved)
        return _add(rest, _rotated(shift, torch.zeros_like(layout.rest_positions), layout.rest_positions, rope))

    def corrected_values(self, layout: RunLayout, new: Tensor, reused: Tensor, rest: Tensor) -> Tensor:
        """Return the values of the tokens that stay, corrected; arguments as for `corrected_keys`."""
        return _add(rest, self.estimator.estimate(layout, new.float() - reused.float()))


CORRECTIONS: dict[str, DriftCorrection | None] = {"none": None, "drift": DriftCorrection()}
"""What the setting `correction` names."""


def drift_correction(name: str) -> DriftCorrection | None:
    """Return the correction called `name`; raises `ConfigError` that lists what exists."""
    if name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {name!r}; choose {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name]


def _add(rest: Tensor, shift: Tensor) -> Tensor:
    return (rest.float() + shift).to(rest.dtype)


def _rotated(keys: Tensor, source: Tensor, target: Tensor, rope: RopeSpec) -> Tensor:
    return rotate_keys(keys, RopeShift.between(source, target, rope.inv_freq), rope.pairing)


def _summed(members: Tensor, rows: Tensor) -> Tensor:
    """Sum rows (n, ...) per run: (num_runs, ...)."""
    return (members @ rows.flatten(1)).view(len(members), *rows.shape[1:])


def _run_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
