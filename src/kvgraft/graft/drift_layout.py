"""Sampled and remaining tokens of a prompt's runs, laid out for tensors once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvgraft.graft.rope import RopeShift, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvgraft.graft.rope import RopeSpec


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class DriftRun:
    """A run of reused tokens: int64 ascending positions of computed ones that show its drift, and of the rest to correct.

    `repeats` are those of both that the prompt says before the run, too.
    """

    sample: NDArray[np.int64]
    rest: NDArray[np.int64]
    repeats: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class RunLayout:
    """The sampled and the remaining tokens of some runs of one prompt, run after run.

    Attributes:
        sample_run: int64 (num_sampled,), ascending: the run of each sampled token, from 0 on.
        rest_run: int64 (num_rest,), likewise of each token that stays.
        sample_positions: int64 (num_sampled,), prompt positions.
        rest_positions: int64 (num_rest,).
        sample_repeats: bool (num_sampled,), whether the prompt says a token before its run, too; None where it says none so.
        rest_repeats: bool (num_rest,), likewise.
    """

    sample_run: Tensor
    rest_run: Tensor
    sample_positions: Tensor
    rest_positions: Tensor
    num_runs: int
    sample_repeats: Tensor | None = None
    rest_repeats: Tensor | None = None
    _formed: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Sequence[DriftRun], device: torch.device) -> RunLayout:
        """Lay out `runs`, at least one, on `device`."""
        return cls(
            _run_of([len(run.sample) for run in runs], device),
            _run_of([len(run.rest) for run in runs], device),
            torch.cat([torch.from_numpy(run.sample) for run in runs]).to(device),
            torch.cat([torch.from_numpy(run.rest) for run in runs]).to(device),
            len(runs),
            *_repeats_of(runs, device),
        )

    def keep_rest(self, kept: Tensor) -> RunLayout:
        """Return the same runs with the remaining tokens for which `kept`, bool (num_rest,), is true."""
        rest_run, rest_positions = self.rest_run[kept], self.rest_positions[kept]
        rest_repeats = None if self.rest_repeats is None else self.rest_repeats[kept]
        return RunLayout(
            self.sample_run,
            rest_run,
            self.sample_positions,
            rest_positions,
            self.num_runs,
            self.sample_repeats,
            rest_repeats,
        )

    def once(self, key: Hashable, form: Callable[[], T]) -> T:
        """Return the object called `key`, formed from the layout alone and so the same in all layers."""
        if key not in self._formed:
            self._formed[key] = form()
        formed: T = self._formed[key]
        return formed

    def turns(self, rope: RopeSpec | None) -> Turns:
        """Return the turns of these tokens' keys to position 0 and back, formed once per frequency table."""
        return self.once(("turns", None if rope is None else id(rope.inv_freq)), lambda: Turns.of(self, rope))

    def batches(self, *, together: bool) -> tuple[tuple[Groups, Groups], ...]:
        """Return sampled and remaining tokens by run, runs of like length side by side; all as one group if `together`."""
        return self.once(("batches", together), lambda: tuple(self._batches(together=together)))

    def members(self) -> tuple[Tensor, Tensor]:
        """Return the run of each token, sampled ones first, and `members_of` these."""

        def form() -> tuple[Tensor, Tensor]:
            run = torch.cat([self.sample_run, self.rest_run])
            return run, members_of(run, self.num_runs)

        return self.once("members", form)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Return float32 memory called `name`, overwritten by every layer: fresh memory costs page faults."""
        return self.once((name, *shape), lambda: torch.empty(shape, device=self.sample_run.device))

    def _batches(self, *, together: bool) -> Iterator[tuple[Groups, Groups]]:
        device = self.sample_run.device
        if together:
            yield Groups.of([0], [len(self.sample_run)], device), Groups.of([0], [len(self.rest_run)], device)
            return
        sample, rest = (_Spans.of(run, self.num_runs) for run in (self.sample_run, self.rest_run))
        for runs in _alike(rest.lengths):
            yield sample.groups(runs, device), rest.groups(runs, device)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Tokens of some groups as a rectangle with a row per group.

    Attributes:
        index: int64 (num_groups, longest group), number of the token; any where there is none.
        exists: bool, likewise.
        tokens: int64 (n,), those of all groups in the order of `index`.
        piece: Slice of the tokens if they fill the rectangle and follow one another, so that none need be gathered.
    """

    index: Tensor
    exists: Tensor
    tokens: Tensor
    piece: slice | None

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Groups:
        """Lay out groups, at least one, of consecutive tokens."""
        first, count = torch.tensor([starts, lengths], device=device)[:, :, None]
        column = torch.arange(max(lengths), device=device)
        exists = column < count
        index = torch.where(exists, first + column, 0)
        follows = all(
            start + length == after for start, length, after in zip(starts, lengths, starts[1:], strict=False)
        )
        is_piece = follows and min(lengths) == max(lengths)
        return cls(index, exists, index[exists], slice(starts[0], starts[-1] + lengths[-1]) if is_piece else None)

    def take(self, tokens: Tensor) -> Tensor:
        """Return (num_tokens, ...) as (num_groups, longest group, ...)."""
        if self.piece is None:
            return tokens[self.index]
        return tokens[self.piece].view(*self.index.shape, *tokens.shape[1:])

    def put(self, padded: Tensor, tokens: Tensor) -> None:
        """Write (num_groups, longest group, ...) back into (num_tokens, ...)."""
        if self.piece is None:
            tokens[self.tokens] = padded[self.exists]
        else:
            tokens[self.piece] = padded.flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Rotations of a layout's keys to position 0 and from there; none if `rope` is None."""

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
        """Turn keys of the sampled tokens to position 0."""
        return self._turned(keys, self._sample_back)

    def rest_back(self, keys: Tensor) -> Tensor:
        """Turn keys of the tokens that stay to position 0."""
        return self._turned(keys, self._rest_back)

    def rest_forth(self, keys: Tensor, out: Tensor) -> Tensor:
        """Turn keys at position 0 to the positions of the tokens that stay, into `out` if they turn at all."""
        return self._turned(keys, self._rest_forth, out)

    def _turned(self, keys: Tensor, shift: RopeShift | None, out: Tensor | None = None) -> Tensor:
        return keys if self.rope is None or shift is None else rotate_keys(keys, shift, self.rope.pairing, out)


class _Spans(NamedTuple):
    """Start and length of each run's tokens."""

    starts: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, run: Tensor, num_runs: int) -> _Spans:
        lengths = torch.bincount(run, minlength=num_runs)
        return cls((lengths.cumsum(0) - lengths).tolist(), lengths.tolist())

    def groups(self, runs: Sequence[int], device: torch.device) -> Groups:
        return Groups.of([self.starts[run] for run in runs], [self.lengths[run] for run in runs], device)


_LEAST_APART = 256
"""Shorter runs are computed side by side, however different their lengths."""


def _alike(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batch the runs that have tokens, so that none is padded to more than twice its length unless it is short."""
    batch: list[int] = []
    for run in sorted((run for run, length in enumerate(lengths) if length), key=lambda run: lengths[run]):
        if batch and lengths[run] > max(_LEAST_APART, 2 * lengths[batch[0]]):
            yield sorted(batch)
            batch = []
        batch.append(run)
    if batch:
        yield sorted(batch)


def members_of(run: Tensor, num_runs: int) -> Tensor:
    """Return float32 (num_runs, n): 1 where a token is of a run."""
    return torch.nn.functional.one_hot(run, num_runs).T.to(torch.float32)


def _run_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


def _repeats_of(runs: Sequence[DriftRun], device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return which sampled and which remaining tokens are repeats, or None for both where none is."""
    if not any(len(run.repeats) for run in runs):
        return None, None
    sample = np.concatenate([np.isin(run.sample, run.repeats) for run in runs])
    rest = np.concatenate([np.isin(run.rest, run.repeats) for run in runs])
    return torch.from_numpy(sample).to(device), torch.from_numpy(rest).to(device)
