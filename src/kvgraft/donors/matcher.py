"""From anchors that a prompt shares with donors to verified runs of equal tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.cover import cover
from kvgraft.donors.fingerprint import GRAM_TOKENS, WINDOW_GRAMS, Anchors, Positions
from kvgraft.donors.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvgraft.donors.arena import TokenArena
    from kvgraft.donors.postings import Hits
    from kvgraft.donors.verify import Verifier

_MERGE_GAP = 4 * WINDOW_GRAMS
"""Anchors of one diagonal no farther apart are verified as one interval."""

_DRIFT = np.arange(-3, 4)
"""Tokens by which a donor's text is looked for beside where it would go on after an edit; most edits are as short."""

_REACH = GRAM_TOKENS + 8
"""Tokens beside a run that are compared: a run that begins within them and is as short as any shows."""

_MOST_EDITS = 8
"""Edits in a row, with less than a guaranteed run between them, after which a text counts as another."""

_WORK_PER_TOKEN = 4
"""Token pairs per prompt token up to which everything that anchors propose is verified at once."""


@dataclass(frozen=True, slots=True)
class Passages:
    """The passages of one prompt."""

    length: int
    first: int
    """First prompt position that counts."""
    crowded: Positions
    """Prompt positions of anchors around which there may be passages."""
    lookup: Callable[[Positions], Hits]
    """Finds the places of the passages that begin at some positions, of donors that may be used."""


def find_runs(anchors: Anchors, hits: Hits, passages: Passages, arena: TokenArena, verifier: Verifier) -> Runs:
    """Verify what the indexes propose, and what stands beside it in the same donor.

    Between two edits of a text there may be runs too short to have a common anchor. The diagonals beside those of known
    runs are compared where no run is, and beside what that finds again.

    Args:
        anchors: Of the prompt.
        hits: Entries of the index for these, of donors that may be used.
        passages: Of the prompt.
        arena: Donor tokens.
        verifier: Compares for this prompt.

    Returns:
        Runs of at least a k-gram, in no order; one run may appear more than once.

    Complexity: besides `_indexed_runs`, O(r) for r runs that cover what is found.
    """
    runs, num_old = _indexed_runs(anchors, hits, passages, arena, verifier), 0
    for _ in range(_MOST_EDITS):
        beside = _beside(runs, num_old, verifier.num_tokens)
        if not beside.num_runs or beside.num_tokens > _WORK_PER_TOKEN * verifier.num_tokens:
            break
        num_old = runs.num_runs
        runs = runs.joined(verifier.runs_in(beside))
    return runs


def _beside(runs: Runs, num_old: int, num_tokens: int) -> Runs:
    """Propose the diagonals beside those of runs, next to where these border on text that is in none.

    Of few runs that cover the same as all, and only of those from index `num_old` on: the others were asked before.
    """
    chosen = cover(runs.starts, runs.ends)
    starts, ends = runs.starts[chosen], runs.ends[chosen]
    free_before = np.append(starts[:1], starts[1:] - ends[:-1])
    free_after = np.append(starts[1:], num_tokens)[: len(ends)] - ends
    left = np.flatnonzero((chosen >= num_old) & (free_before >= GRAM_TOKENS))
    right = np.flatnonzero((chosen >= num_old) & (free_after >= GRAM_TOKENS))
    begins = np.append(starts[left] - np.minimum(free_before[left], _REACH), ends[right])
    stops = np.append(starts[left], ends[right] + np.minimum(free_after[right], _REACH))
    beside = runs.take(chosen[np.append(left, right)])
    shifted = (beside.diagonals[:, None] + _DRIFT).ravel()
    begins, stops, rows = (np.repeat(each, len(_DRIFT)) for each in (begins, stops, beside.rows))
    return Runs(begins, stops, shifted, rows)


def _indexed_runs(anchors: Anchors, hits: Hits, passages: Passages, arena: TokenArena, verifier: Verifier) -> Runs:
    """Verify what anchors lead to, and where that leaves passages out, what these lead to.

    An anchor that a prompt repeats proposes every occurrence with every place, quadratically many diagonals for text
    that is periodic, and one that is common proposes more than it is worth. Where that would be too much work, one
    place of the first occurrence goes first, and the others only where passages are still in no run.

    Arguments and result are those of `find_runs`.
    """
    targets = anchors.positions[hits.query]
    proposals = _proposals(targets, hits, arena)
    if proposals.num_tokens <= _WORK_PER_TOKEN * verifier.num_tokens:
        runs = verifier.runs_in(proposals)
        return runs.joined(_passage_runs(runs, passages, arena, verifier))
    later = ~_is_first(anchors, hits)
    runs = verifier.runs_in(_proposals(targets[~later], hits.where(~later), arena))
    runs = runs.joined(_passage_runs(runs, passages, arena, verifier))
    missing = np.cumsum(np.append(0, ~_begin_in(runs, passages, verifier.num_tokens)))
    begin, end = _around(targets, passages, len(missing) - 1)
    later &= missing[end] > missing[begin]
    return runs.joined(verifier.runs_in(_proposals(targets[later], hits.where(later), arena)))


def _is_first(anchors: Anchors, hits: Hits) -> NDArray[np.bool_]:
    """Mark one hit of the first occurrence of each anchor."""
    is_first = np.zeros(len(anchors.hashes), np.bool_)
    is_first[np.unique(anchors.hashes, return_index=True)[1]] = True
    heads = np.append(True, hits.query[1:] != hits.query[:-1])
    return heads & is_first[hits.query]


def _passage_runs(runs: Runs, passages: Passages, arena: TokenArena, verifier: Verifier) -> Runs:
    """Verify passages that are in no run and have a crowded anchor; of what is found, few with the same tokens as all.

    Complexity: O(n), or O(1) if there is no such anchor; without extending runs, no more than twice the prompt's
        tokens are compared.
    """
    num_passages = verifier.num_tokens - passages.length + 1
    if not len(passages.crowded) or num_passages <= passages.first:
        return Runs.empty()
    near = _marked(*_around(passages.crowded, passages, num_passages), num_passages)
    wanted = np.flatnonzero(near & ~_begin_in(runs, passages, verifier.num_tokens))
    found = passages.lookup(wanted)
    if not len(found.query):
        return Runs.empty()
    found = found.where(_few_of_all(wanted[found.query], passages.length))
    starts, rows = wanted[found.query], found.rows
    diagonals = arena.starts[rows] + found.positions - starts
    return verifier.runs_in(Runs(starts, starts + passages.length, diagonals, rows))


def _few_of_all(starts: Positions, length: int) -> NDArray[np.bool_]:
    """Mark few of the intervals `[start, start + length)`, with ascending starts, that have the union of all.

    Of those that begin in one stretch of `length` positions the last, and the first too where the last one marked before
    does not reach so far; these two overlap.
    """
    stretch = starts // length
    last = np.append(np.flatnonzero(stretch[1:] != stretch[:-1]), len(starts) - 1)
    first = last[:-1] + 1
    few = np.zeros(len(starts), np.bool_)
    few[:1] = True
    few[last] = True
    few[first[starts[last[1:]] > starts[last[:-1]] + length]] = True
    return few


def _around(targets: Positions, passages: Passages, num_passages: int) -> tuple[Positions, Positions]:
    """Return the range `[begin, end)` of the passages with the anchor at each of `targets`."""
    begin = np.minimum(np.maximum(targets + (GRAM_TOKENS - passages.length), passages.first), num_passages)
    return begin, np.maximum(np.minimum(targets + 1, num_passages), begin)


def _begin_in(runs: Runs, passages: Passages, num_tokens: int) -> NDArray[np.bool_]:
    """Mark where passages begin that lie in a run."""
    num_passages = max(0, num_tokens - passages.length + 1)
    is_long = runs.ends - runs.starts >= passages.length
    return _marked(runs.starts[is_long], runs.ends[is_long] - (passages.length - 1), num_passages)


def _marked(starts: Positions, ends: Positions, size: int) -> NDArray[np.bool_]:
    """Mark the indices below `size` that lie in an interval."""
    depth = np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1)
    marked: NDArray[np.bool_] = np.cumsum(depth[:size]) > 0
    return marked


def _proposals(targets: Positions, hits: Hits, arena: TokenArena) -> Runs:
    """Join hits of one donor and diagonal that are near each other into intervals to verify.

    The outer anchors of a run lie within a window of its ends, so an interval a window longer mostly holds all of it.
    """
    diagonals = arena.starts[hits.rows] + hits.positions - targets
    order = np.argsort(diagonals, kind="stable")
    targets, diagonals, rows = targets[order], diagonals[order], hits.rows[order]
    heads = np.ones(len(order), np.bool_)
    heads[1:] = diagonals[1:] != diagonals[:-1]
    heads[1:] |= rows[1:] != rows[:-1]
    heads[1:] |= targets[1:] - targets[:-1] > _MERGE_GAP
    tails = np.append(heads[1:], True)[: len(order)]
    ends = targets[tails] + (GRAM_TOKENS + WINDOW_GRAMS)
    return Runs(targets[heads] - WINDOW_GRAMS, ends, diagonals[heads], rows[heads])
