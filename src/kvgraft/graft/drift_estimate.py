"""Estimators of the movement of tokens that stay from that of sampled ones: `MeanShift` and `KernelRidge`.

A mean per run and layer of recomputed tokens, weighted, is what AgentKVShift adds (https://arxiv.org/abs/2607.21604).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    """Reused keys and values of a layout's tokens, float32, keys in the frame in which movements are compared.

    Shapes: (num_sampled, heads, head_dim) and (num_rest, heads, head_dim).
    """

    sample: tuple[Tensor, Tensor]
    rest: tuple[Tensor, Tensor]


Shift = Callable[[Tensor, Tensor], Tensor]
"""From movements (num_sampled, heads, head_dim), float32, new minus reused, to shifts (num_rest, heads, head_dim).

The second tensor, float32 and contiguous, takes the shifts and is returned.
"""


class DriftEstimator(ABC):
    """Estimates the movement of tokens that stay from that of sampled ones. Frozen dataclasses; fields are parameters."""

    least_sample: ClassVar[int] = 1
    """Runs with fewer sampled tokens are left alone."""

    @property
    def needs_reused(self) -> bool:
        """Whether `for_layer` needs the reused K/V."""
        return False

    @property
    def pools_runs(self) -> bool:
        """Whether a run's estimate uses the samples of others. All of them are computed in one piece then."""
        return False

    @abstractmethod
    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """Floating-point operations for one run in one layer; `width` is keys and values of a token together."""

    @abstractmethod
    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """Return the estimator of one layer's shifts, for keys and values alike; 0 where nothing moved.

        Args:
            layout: Runs and positions of the tokens.
            reused: For estimators that need it.
        """


@dataclass(frozen=True)
class MeanShift(DriftEstimator):
    """One shift per run and head: the sample's mean, shrunk towards 0.

    Attributes:
        shrink: Multiply the mean by (signal - noise) / signal, not below 0, where the noise is the sample's variance over its
            size: the expected square of a mean of so few tokens without any drift.
    """

    least_sample: ClassVar[int] = 4
    shrink: bool = True

    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """See `DriftEstimator`: difference, mean, spread, sum."""
        return float(width * (5 * num_sampled + num_rest))

    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """See `DriftEstimator`. O(num_runs * num_sampled * heads * head_dim)."""
        return lambda moved, out: self._shift(layout, moved, out)

    def _shift(self, layout: RunLayout, moved: Tensor, out: Tensor) -> Tensor:
        members = members_of(layout.sample_run, layout.num_runs)
        count = members.sum(1)[:, None, None]
        mean = _summed(members, moved) / count
        if self.shrink:
            spread = (moved - mean[layout.sample_run]).square().sum(-1, keepdim=True)
            noise = _summed(members, spread) / (count - 1).clamp(min=1) / count
            signal = (mean.square().sum(-1, keepdim=True) - noise).clamp(min=0)
            mean = mean * signal / (signal + noise).clamp(min=torch.finfo(mean.dtype).tiny)
        return torch.index_select(mean, 0, layout.rest_run, out=out)


@dataclass(frozen=True)
class KernelRidge(DriftEstimator):
    """A shift per token: kernel ridge regression on the sampled tokens, with one set of weights for all heads.

    Two tokens move alike as far as they are of one run, stand near one another, and had similar K/V:

        k(i, j) = same_run * (const + near * exp(-|i - j| / reach) + like * s^2) + across * s^2,  s = max(0, cosine of K/V)

    where the cosine is the mean of that of keys and that of values, each after subtraction of its run's mean. Between two
    tokens that the prompt says before their run, too, `twice` stands in place of `near`: K/V of a text that was new all move
    alike, and far, where it is repeated. The noise keeps estimates small where samples are few: n of them and the constant
    term alone give mean * n / (n + noise / const). Still, of fewer than eight too little is known: four heads of runs have
    made answers worse than no correction (docs/adr/0006).

    Attributes:
        const: Weight of being of one run.
        near: Weight of the distance.
        reach: Distance in tokens at which that falls to 1/e.
        like: Weight of the similarity within a run. By default 0: weights then depend on positions alone, so that they are
            formed once for all layers and are the same on every tensor-parallel rank.
        across: Weight of the similarity across runs; above 0 all runs are computed in one piece.
        noise: Variance of what tokens do on their own, in the unit of these weights.
        twice: Weight of being of one run and said before it: so large that the mean of the sample is hardly shrunk.

    Source: Gaussian-process regression, Rasmussen and Williams 2006, chapter 2.
    """

    least_sample: ClassVar[int] = 8
    const: float = 0.3
    near: float = 1.0
    reach: float = 16.0
    like: float = 0.0
    across: float = 0.0
    noise: float = 5.0
    twice: float = 30.0

    def __post_init__(self) -> None:
        if min(self.const, self.near, self.twice, self.like, self.across) < 0 or not (
            self.reach > 0 and self.noise > 0
        ):
            raise ConfigError("a kernel ridge needs weights >= 0, and reach and noise above 0")

    @property
    def needs_reused(self) -> bool:
        """Whether K/V count: without likeness, weights depend on positions alone and are the same in all layers."""
        return self.like > 0 or self.across > 0

    @property
    def pools_runs(self) -> bool:
        """Whether runs share samples."""
        return self.across > 0

    def operations(self, num_sampled: int, num_rest: int, width: int) -> float:
        """See `DriftEstimator`: shifts, and of likeness directions, cosines and weights.

        Samples of other runs (`across`) are not counted, nor what is formed once for all layers.
        """
        tokens = num_sampled + num_rest
        shifts = 2.0 * width * num_sampled * num_rest
        if not self.needs_reused:
            return shifts
        return shifts + width * (6.0 + 2 * num_sampled) * tokens + num_sampled**3 / 3 + 2 * num_sampled**2 * width

    def for_layer(self, layout: RunLayout, reused: ReusedKV | None) -> Shift:
        """See `DriftEstimator`.

        Complexity: per run O(num_rest * num_sampled * heads * head_dim); O(num_rest * num_sampled^2 + num_sampled^3) once for
        all layers, or with likeness O((num_rest + num_sampled) * num_sampled * heads * head_dim + num_sampled^3) in each.
        """
        batches = layout.batches(together=self.pools_runs)
        if not self.needs_reused:
            weights = layout.once(("weights", self), lambda: [self._weights(layout, *batch) for batch in batches])
            return lambda moved, out: _weighed(batches, weights, moved, out)
        assert reused is not None
        directions = _directions(layout, reused)
        num_sampled = len(layout.sample_run)
        places = layout.once(self, lambda: [self._among_and_between(layout, *batch) for batch in batches])
        solvers = [
            self._solver(sample.take(directions[:num_sampled]), rest.take(directions[num_sampled:]), *found)
            for (sample, rest), found in zip(batches, places, strict=True)
        ]

        def shift(moved: Tensor, out: Tensor) -> Tensor:
            flat, shifts = moved.flatten(1), out.flatten(1)
            for (sample, rest), (factor, cross) in zip(batches, solvers, strict=True):
                rest.put(cross @ torch.cholesky_solve(sample.take(flat), factor), shifts)
            return out

        return shift

    def _weights(self, layout: RunLayout, sample: Groups, rest: Groups) -> Tensor:
        """Return weights (groups, longest rest, longest sample) of sampled tokens by places alone."""
        among, between = self._among_and_between(layout, sample, rest)
        known = among.own.clone()
        known.diagonal(dim1=1, dim2=2).add_(self.noise)
        return torch.cholesky_solve(between.own, torch.linalg.cholesky(known)).mT.contiguous()

    def _solver(self, sampled: Tensor, others: Tensor, among: _Places, between: _Places) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor among sampled tokens of a batch, and their weights for the others, by directions."""
        known = among.kernel(sampled, sampled)
        known.diagonal(dim1=1, dim2=2).add_(self.noise)
        return torch.linalg.cholesky(known), between.kernel(sampled, others).mT

    def _among_and_between(self, layout: RunLayout, sample: Groups, rest: Groups) -> tuple[_Places, _Places]:
        sampled, others = (
            _Tokens(
                groups.take(run), groups.take(positions), groups.exists, None if said is None else groups.take(said)
            )
            for groups, run, positions, said in (
                (sample, layout.sample_run, layout.sample_positions, layout.sample_repeats),
                (rest, layout.rest_run, layout.rest_positions, layout.rest_repeats),
            )
        )
        return self._places(sampled, sampled), self._places(sampled, others)

    def _places(self, sampled: _Tokens, others: _Tokens) -> _Places:
        """Return the part of the kernel that is the same in every layer."""
        exists = sampled.exists[:, :, None] & others.exists[:, None]
        same_run = (exists & (sampled.run[:, :, None] == others.run[:, None])).to(torch.float32)
        distance = (sampled.positions[:, :, None] - others.positions[:, None]).abs()
        near = torch.exp(distance / -self.reach).mul_(self.near)
        if sampled.repeats is not None and others.repeats is not None:
            is_either = sampled.repeats[:, :, None] | others.repeats[:, None]
            is_both = sampled.repeats[:, :, None] & others.repeats[:, None]
            near = near.masked_fill_(is_either, 0.0).masked_fill_(is_both, self.twice)
        return _Places(same_run * near.add_(self.const), self.like * same_run + self.across * exists)


class _Places(NamedTuple):
    """The part of a kernel that depends on the places of tokens, each (groups, sampled, others).

    `own` weighs being of one run and the distance in it, `likeness` the squared similarity.
    """

    own: Tensor
    likeness: Tensor

    def kernel(self, sampled: Tensor, others: Tensor) -> Tensor:
        """Return (groups, sampled, others) of directions, each (groups, tokens, width); 0 where there is no token."""
        return (sampled @ others.mT).clamp_(min=0).square_().mul_(self.likeness).add_(self.own)


class _Tokens(NamedTuple):
    """Tokens of a kernel, each (groups, longest group)."""

    run: Tensor
    positions: Tensor
    exists: Tensor
    repeats: Tensor | None


def _weighed(batches: Sequence[tuple[Groups, Groups]], weights: Sequence[Tensor], moved: Tensor, out: Tensor) -> Tensor:
    flat, shifts = moved.flatten(1), out.flatten(1)
    for (sample, rest), weight in zip(batches, weights, strict=True):
        if rest.piece is None:
            rest.put(weight @ sample.take(flat), shifts)
        else:
            torch.matmul(weight, sample.take(flat), out=rest.take(shifts))
    return out


def _directions(layout: RunLayout, reused: ReusedKV) -> Tensor:
    """Return (num_sampled + num_rest, width): products are the mean cosine of keys and values less their run's mean."""
    run, members = layout.members()
    num_sampled, key_width = len(layout.sample_run), reused.sample[0][0].numel()
    num_tokens = num_sampled + len(layout.rest_run)
    directions = layout.buffer("directions", num_tokens, key_width + reused.sample[1][0].numel())
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
