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
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvgraft.errors import ConfigError
from kvgraft.graft.rope import RopeShift, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.graft.rope import RopeSpec


T = TypeVar("T")


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
        num_runs: How many runs there are.
    """

    sample_run: Tensor
    rest_run: Tensor
    sample_positions: Tensor
    rest_positions: Tensor
    num_runs: int
    _turns: dict[int, Turns] = field(default_factory=dict)
    _groups: dict[bool, tuple[Groups, Groups]] = field(default_factory=dict)
    _once: dict[DriftEstimator, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Sequence[DriftRun], device: torch.device) -> RunLayout:
        """Lay out `runs`, at least one, on `device`."""
        return cls(
            _run_of([len(run.sample) for run in runs], device),
            _run_of([len(run.rest) for run in runs], device),
            torch.cat([torch.from_numpy(run.sample) for run in runs]).to(device),
            torch.cat([torch.from_numpy(run.rest) for run in runs]).to(device),
            len(runs),
        )

    def keep_rest(self, kept: Tensor) -> RunLayout:
        """The same runs with those of the remaining tokens for which `kept`, bool (num_rest,), is true."""
        rest_run, rest_positions = self.rest_run[kept], self.rest_positions[kept]
        return RunLayout(self.sample_run, rest_run, self.sample_positions, rest_positions, self.num_runs)

    def turns(self, rope: RopeSpec | None) -> Turns:
        """How keys of these tokens turn to position 0 and back; for one frequency table once for all layers."""
        key = 0 if rope is None else id(rope.inv_freq)
        if key not in self._turns:
            self._turns[key] = Turns.of(self, rope)
        return self._turns[key]

    def once(self, estimator: DriftEstimator, form: Callable[[], T]) -> T:
        """What an estimator forms from the layout alone; once for all layers."""
        if estimator not in self._once:
            self._once[estimator] = form()
        formed: T = self._once[estimator]
        return formed

    def groups(self, *, together: bool) -> tuple[Groups, Groups]:
        """Sampled and remaining tokens run by run, or all `together`; once for all layers."""
        if together not in self._groups:
            runs = (torch.zeros_like(run) if together else run for run in (self.sample_run, self.rest_run))
            sample, rest = (Groups.of(run, 1 if together else self.num_runs) for run in runs)
            self._groups[together] = sample, rest
        return self._groups[together]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Tokens that lie group by group one behind the other, as a rectangle with a row per group.

    Attributes:
        index: int64 (num_groups, longest group), which token; any where there is none.
        exists: bool, likewise.
    """

    index: Tensor
    exists: Tensor

    @classmethod
    def of(cls, group: Tensor, num_groups: int) -> Groups:
        """Lay out tokens by the ascending number of their group, int64 (n,)."""
        count = torch.bincount(group, minlength=num_groups)
        column = torch.arange(int(count.max()), device=group.device)
        exists = column < count[:, None]
        return cls(torch.where(exists, (count.cumsum(0) - count)[:, None] + column, 0), exists)

    def take(self, tokens: Tensor) -> Tensor:
        """(n, ...) as (num_groups, longest group, ...)."""
        return tokens[self.index]

    def flat(self, padded: Tensor) -> Tensor:
        """Back again."""
        return padded[self.exists]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Keys of a layout's tokens to position 0 and from there; as they are where `rope` is None."""

    rope: RopeSpec | None
    _sample_back: RopeShift | None = None
    _rest_back: RopeShift | None = None
    _rest_forth: RopeShift | None = None

    @classmethod
    def of(cls, layout: RunLayout, rope: RopeSpec | None) -> Turns:
        """Form the angles."""
        if rope is None:
            return cls(None)
        sample, rest = layout.sample_positions, layout.rest_positions
        return cls(
            rope,
            RopeShift.between(sample, torch.zeros_like(sample), rope.inv_freq),
            RopeShift.between(rest, torch.zeros_like(rest), rope.inv_freq),
            RopeShift.between(torch.zeros_like(rest), rest, rope.inv_freq),
        )

    def sample_back(self, keys: Tensor) -> Tensor:
        """Keys of the sampled tokens at position 0."""
        return self._turned(keys, self._sample_back)

    def rest_back(self, keys: Tensor) -> Tensor:
        """Keys of the tokens that stay at position 0."""
        return self._turned(keys, self._rest_back)

    def rest_forth(self, keys: Tensor) -> Tensor:
        """Keys at position 0 at those of the tokens that stay."""
        return self._turned(keys, self._rest_forth)

    def _turned(self, keys: Tensor, shift: RopeShift | None) -> Tensor:
        return keys if self.rope is None or shift is None else rotate_keys(keys, shift, self.rope.pairing)


@dataclass(frozen=True, slots=True, eq=False)
class ReusedKV:
    """What the tokens of a layout held when they were reused, float32, keys in the frame in which movements are compared.

    Attributes:
        sample: Keys and values of the sampled tokens, each (num_sampled, heads, head_dim).
        rest: Of those that stay, each (num_rest, heads, head_dim).
    """

    sample: tuple[Tensor, Tensor]
    rest: tuple[Tensor, Tensor]


Shift = Callable[[Tensor], Tensor]
"""From movements (num_sampled, heads, head_dim), float32, new minus reused, to shifts (num_rest, heads, head_dim)."""


class DriftEstimator(ABC):
    """Estimates the movement of tokens that stay from that of sampled ones. Frozen dataclasses; fields are parameters."""

    needs_reused: ClassVar[bool] = False
    """Whether it looks at what was reused."""
    least_sample: ClassVar[int] = 1
    """Runs with fewer sampled tokens are left alone."""

    @property
    def pools_runs(self) -> bool:
        """Whether a run's estimate uses the samples of others. All of them are computed in one piece then."""
        return False

    @abstractmethod
    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """Floating-point operations for one run in one layer; `width` is keys and values of a token together."""

    @abstractmethod
    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """Return what estimates the shifts of one layer, of its keys and of its values alike; 0 where nothing moved.

        Args:
            layout: Which token belongs to which run.
            reused: What lay there, for estimators that need it.
        """


@dataclass(frozen=True)
class MeanShift(DriftEstimator):
    """One shift per run and head: the sample's mean, shrunk towards 0.

    Attributes:
        shrink: Multiply the mean by (signal - noise) / signal, not below 0, where the noise is the sample's variance over its
            size: what a mean of so few tokens shows where there is no drift at all.
    """

    least_sample: ClassVar[int] = 4
    shrink: bool = True

    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """See `DriftEstimator`: difference, mean, spread, sum."""
        return float(width * (5 * num_sampled + num_rest))

    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """See `DriftEstimator`. O(num_runs * num_sampled * heads * head_dim)."""
        return lambda moved: self._shift(layout, moved)

    def _shift(self, layout: RunLayout, moved: Tensor) -> Tensor:
        members = _members(layout.sample_run, layout.num_runs)
        count = members.sum(1)[:, None, None]
        mean = _summed(members, moved) / count
        if self.shrink:
            spread = (moved - mean[layout.sample_run]).square().sum(-1, keepdim=True)
            noise = _summed(members, spread) / (count - 1).clamp(min=1) / count
            signal = (mean.square().sum(-1, keepdim=True) - noise).clamp(min=0)
            mean = mean * signal / (signal + noise).clamp(min=torch.finfo(mean.dtype).tiny)
        return mean[layout.rest_run]


@dataclass(frozen=True)
class KernelRidge(DriftEstimator):
    """A shift per token: kernel ridge regression on the sampled tokens, with one set of weights for all heads.

    Two tokens move alike as far as they are of one run, stand near one another, and had similar K/V:

        k(i, j) = same_run * (const + near * exp(-|i - j| / reach) + like * s^2) + across * s^2,  s = max(0, cosine of K/V)

    where the cosine is the mean of that of keys and that of values, each behind the removal of its run's mean. The noise
    keeps estimates small where samples are few: n of them and the constant term alone give mean * n / (n + noise / const).

    Attributes:
        const: Weight of being of one run.
        near: Weight of the distance.
        reach: Distance in tokens at which that falls to 1/e.
        like: Weight of the similarity within a run.
        across: Weight of the similarity across runs; above 0 all runs are computed in one piece.
        noise: Variance of what tokens do on their own, in the unit of these weights.

    Source: Gaussian-process regression, Rasmussen and Williams 2006, chapter 2.
    """

    needs_reused: ClassVar[bool] = True
    const: float = 0.3
    near: float = 1.0
    reach: float = 16.0
    like: float = 3.0
    across: float = 0.0
    noise: float = 5.0

    def __post_init__(self) -> None:
        if min(self.const, self.near, self.like, self.across) < 0 or not (self.reach > 0 and self.noise > 0):
            raise ConfigError("a kernel ridge needs weights >= 0, and reach and noise above 0")

    @property
    def pools_runs(self) -> bool:
        """Whether runs share samples."""
        return self.across > 0

    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """See `DriftEstimator`: directions, cosines, weights, shifts. Samples of other runs (`across`) are not counted."""
        tokens = num_sampled + num_rest
        solved = num_sampled**3 / 3 + 2 * num_sampled**2 * width
        return width * (6.0 * tokens + 2 * num_sampled * tokens + 2 * num_sampled * num_rest) + solved

    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """See `DriftEstimator`.

        Complexity: per run O((num_rest + num_sampled) * num_sampled * heads * head_dim + num_sampled^3).
        """
        assert reused is not None
        sample, rest = layout.groups(together=self.pools_runs)
        directions = _directions(layout, reused)
        num_sampled = len(layout.sample_run)
        sampled = _Tokens.of(sample, layout.sample_run, layout.sample_positions, directions[:num_sampled])
        others = _Tokens.of(rest, layout.rest_run, layout.rest_positions, directions[num_sampled:])
        among, between = layout.once(self, lambda: (self._places(sampled, sampled), self._places(sampled, others)))
        known = self._kernel(sampled, sampled, among)
        known.diagonal(dim1=1, dim2=2).add_(self.noise)
        factor, cross = torch.linalg.cholesky(known), self._kernel(sampled, others, between).mT

        def shift(moved: Tensor) -> Tensor:
            solved = torch.cholesky_solve(sample.take(moved.flatten(1)), factor)
            return rest.flat(cross @ solved).view(-1, *moved.shape[1:])

        return shift

    def _kernel(self, sampled: _Tokens, others: _Tokens, places: _Places) -> Tensor:
        """(groups, sampled, others); 0 where there is no token."""
        kernel = (sampled.directions @ others.directions.mT).clamp_(min=0).square_()
        return kernel.mul_(places.likeness).add_(places.own)

    def _places(self, sampled: _Tokens, others: _Tokens) -> _Places:
        """What is the same in every layer."""
        exists = sampled.exists[:, :, None] & others.exists[:, None]
        same_run = (exists & (sampled.run[:, :, None] == others.run[:, None])).to(sampled.directions.dtype)
        distance = (sampled.positions[:, :, None] - others.positions[:, None]).abs()
        near = torch.exp(distance / -self.reach).mul_(self.near)
        return _Places(same_run * near.add_(self.const), self.like * same_run + self.across * exists)


class _Places(NamedTuple):
    """What places of tokens give a kernel, each (groups, sampled, others).

    Attributes:
        own: Weight of being of one run and of the distance in it.
        likeness: By what the squared similarity counts.
    """

    own: Tensor
    likeness: Tensor


class _Tokens(NamedTuple):
    """What the kernel compares, each (groups, longest group, ...)."""

    run: Tensor
    positions: Tensor
    directions: Tensor
    exists: Tensor

    @classmethod
    def of(cls, groups: Groups, run: Tensor, positions: Tensor, directions: Tensor) -> _Tokens:
        return cls(groups.take(run), groups.take(positions), groups.take(directions), groups.exists)


def _directions(layout: RunLayout, reused: ReusedKV) -> Tensor:
    """(num_sampled + num_rest, width), of which products are the mean cosine of keys and values behind their run's mean."""
    run = torch.cat([layout.sample_run, layout.rest_run])
    members = _members(run, layout.num_runs)
    parts = []
    for sample, rest in zip(reused.sample, reused.rest, strict=True):
        tokens = torch.cat([sample, rest]).flatten(1)
        mean = members @ tokens / members.sum(1, keepdim=True)
        parts.append(torch.nn.functional.normalize(tokens - mean[run], dim=1))
    return torch.cat(parts, dim=1) / 2**0.5


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
        if self.keys:
            keys = _add(keys, turns.rest_forth(shift(turns.sample_back(new[0].float()) - before[0])))
        if self.values:
            values = _add(values, shift(new[1].float() - before[1]))
        return keys, values


CORRECTIONS: dict[str, DriftCorrection | None] = {"none": None, "drift": DriftCorrection()}
"""What the setting `correction` names."""


def drift_correction(name: str) -> DriftCorrection | None:
    """Return the correction called `name`; raises `ConfigError` that lists what exists."""
    if name not in CORRECTIONS:
        raise ConfigError(f"unknown correction {name!r}; choose {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name]


def _add(rest: Tensor, shift: Tensor) -> Tensor:
    return (rest.float() + shift).to(rest.dtype)


def _members(run: Tensor, num_runs: int) -> Tensor:
    """float32 (num_runs, n): 1 where a token is of a run."""
    return torch.nn.functional.one_hot(run, num_runs).T.to(torch.float32)


def _summed(members: Tensor, rows: Tensor) -> Tensor:
    """Sum rows (n, ...) per run: (num_runs, ...)."""
    return (members @ rows.flatten(1)).view(len(members), *rows.shape[1:])


def _run_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
