"""How far tokens that stay moved, estimated from how far sampled ones did: `MeanShift` and `KernelRidge`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvgraft.errors import ConfigError
from kvgraft.graft.drift_layout import members_of

if TYPE_CHECKING:
    from kvgraft.graft.drift_layout import Groups, RunLayout


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
        members = members_of(layout.sample_run, layout.num_runs)
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
        directions = _directions(layout, reused)
        num_sampled, num_rest = len(layout.sample_run), len(layout.rest_run)
        batches = layout.batches(together=self.pools_runs)
        places = layout.once(self, lambda: [self._among_and_between(layout, *batch) for batch in batches])
        solvers = [
            self._solver(sample.take(directions[:num_sampled]), rest.take(directions[num_sampled:]), *found)
            for (sample, rest), found in zip(batches, places, strict=True)
        ]

        def shift(moved: Tensor) -> Tensor:
            flat = moved.flatten(1)
            shifts = flat.new_empty(num_rest, flat.shape[1])
            for (sample, rest), (factor, cross) in zip(batches, solvers, strict=True):
                rest.put(cross @ torch.cholesky_solve(sample.take(flat), factor), shifts)
            return shifts.view(num_rest, *moved.shape[1:])

        return shift

    def _solver(self, sampled: Tensor, others: Tensor, among: _Places, between: _Places) -> tuple[Tensor, Tensor]:
        """Of directions of a batch: the Cholesky factor among sampled tokens, and the weights of these for the others."""
        known = among.kernel(sampled, sampled)
        known.diagonal(dim1=1, dim2=2).add_(self.noise)
        return torch.linalg.cholesky(known), between.kernel(sampled, others).mT

    def _among_and_between(self, layout: RunLayout, sample: Groups, rest: Groups) -> tuple[_Places, _Places]:
        sampled = _Tokens(sample.take(layout.sample_run), sample.take(layout.sample_positions), sample.exists)
        others = _Tokens(rest.take(layout.rest_run), rest.take(layout.rest_positions), rest.exists)
        return self._places(sampled, sampled), self._places(sampled, others)

    def _places(self, sampled: _Tokens, others: _Tokens) -> _Places:
        """What is the same in every layer."""
        exists = sampled.exists[:, :, None] & others.exists[:, None]
        same_run = (exists & (sampled.run[:, :, None] == others.run[:, None])).to(torch.float32)
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

    def kernel(self, sampled: Tensor, others: Tensor) -> Tensor:
        """Of directions, each (groups, tokens, width): (groups, sampled, others); 0 where there is no token."""
        return (sampled @ others.mT).clamp_(min=0).square_().mul_(self.likeness).add_(self.own)


class _Tokens(NamedTuple):
    """What makes a kernel's places, each (groups, longest group)."""

    run: Tensor
    positions: Tensor
    exists: Tensor


def _directions(layout: RunLayout, reused: ReusedKV) -> Tensor:
    """(num_sampled + num_rest, width), of which products are the mean cosine of keys and values behind their run's mean."""
    run, members = layout.members()
    num_sampled, key_width = len(layout.sample_run), reused.sample[0][0].numel()
    directions = layout.buffer(key_width + reused.sample[1][0].numel())
    for part, sample, rest in zip(directions.tensor_split([key_width], dim=1), reused.sample, reused.rest, strict=True):
        part[:num_sampled] = sample.flatten(1)
        part[num_sampled:] = rest.flatten(1)
        mean = members @ part / members.sum(1, keepdim=True)
        part.sub_(mean[run])
        length = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        part.div_(length.clamp_(min=_LEAST_LENGTH).mul_(2**0.5))
    return directions


_LEAST_LENGTH = 1e-12
"""Shorter directions count as none."""


def _summed(members: Tensor, rows: Tensor) -> Tensor:
    """Sum rows (n, ...) per run: (num_runs, ...)."""
    return (members @ rows.flatten(1)).view(len(members), *rows.shape[1:])
