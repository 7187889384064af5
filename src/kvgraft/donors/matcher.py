"""From anchors that a prompt shares with donors to verified runs of equal tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.cover import undominated
from kvgraft.donors.fingerprint import GRAM_TOKENS, WINDOW_GRAMS, Hashes, Positions
from kvgraft.donors.runs import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.anchors import Hits
    from kvgraft.donors.arena import TokenArena
    from kvgraft.donors.verify import Verifier

_MERGE_GAP = 4 * WINDOW_GRAMS
"""Anchors of one diagonal no farther apart are verified as one interval."""

_SLOTS_PER_HASH = 16


def find_runs(hashes: Hashes, targets: Positions, hits: Hits, arena: TokenArena, verifier: Verifier) -> Runs:
    """Verify what the index proposes.

    A k-gram that a prompt repeats proposes every occurrence with every posting, quadratically many diagonals for text
    that is periodic. So the first occurrence goes first, and a later one only where no run was found.

    Args:
        hashes: Hash of each anchor of the prompt.
        targets: Prompt position of each anchor.
        hits: Entries of the index for `hashes`, of donors that may be used.
        arena: Donor tokens.
        verifier: Compares for this prompt.

    Returns:
        Runs of at least a k-gram, in no order; one run may appear more than once.
    """
    positions = targets[hits.query]
    is_first = _first_of_hash(hashes)[hits.query]
    if is_first.all():
        return verifier.runs_in(_proposals(positions, hits, arena))
    runs = verifier.runs_in(_proposals(positions[is_first], hits.where(is_first), arena))
    rest = np.flatnonzero(~is_first)
    rest = rest[~_covered(positions[rest], runs, verifier.num_tokens)]
    if not len(rest):
        return runs
    return runs.joined(verifier.runs_in(_proposals(positions[rest], hits.where(rest), arena)))


def _first_of_hash(hashes: Hashes) -> NDArray[np.bool_]:
    """Mark the first of equal hashes.

    Most are found by one scatter into slots, in which the first hash stays. Only what met another hash is sorted.
    """
    num_slots = 1 << (_SLOTS_PER_HASH * len(hashes)).bit_length()
    slots = (hashes & np.uint64(num_slots - 1)).view(np.int64)
    index = np.arange(len(hashes), dtype=np.int32)
    first = np.empty(num_slots, np.int32)
    # Of equal slots the last assignment stays.
    first[slots[::-1]] = index[::-1]
    winner = first[slots]
    is_first: NDArray[np.bool_] = winner == index
    met_other = np.flatnonzero(hashes[winner] != hashes)
    is_first[met_other[np.unique(hashes[met_other], return_index=True)[1]]] = True
    return is_first


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


def _covered(positions: Positions, runs: Runs, num_tokens: int) -> NDArray[np.bool_]:
    """Tell for which k-grams at `positions` a run covers every token that a search from there is bound to find.

    Those are the tokens of windows around the k-gram; a run that ends nearer may hide one that goes on.
    """
    kept = undominated(runs.starts, runs.ends)
    starts, ends = runs.starts[kept], runs.ends[kept]
    first = np.maximum(positions - WINDOW_GRAMS, 0)
    behind = np.minimum(positions + (GRAM_TOKENS + WINDOW_GRAMS), num_tokens)
    candidate = np.searchsorted(starts, first, side="right") - 1
    return (candidate >= 0) & (np.append(ends, 0)[candidate] >= behind)
