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
"""Anchors of one diagonal at most this far apart are verified as one interval."""

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
    is_first = _first_of_hash(hashes)[hits.query]
    positions = targets[hits.query]
    runs = verifier.runs_in(_proposals(positions[is_first], hits.where(is_first), arena))
    rest = np.flatnonzero(~is_first)
    rest = rest[~_covered(positions[rest], runs, verifier.num_tokens)]
    if not len(rest):
        return runs
    return runs.joined(verifier.runs_in(_proposals(positions[rest], hits.where(rest), arena)))


def _first_of_hash(hashes: Hashes) -> NDArray[np.bool_]:
    """Mark the first of equal hashes. Of unequal ones hardly any stays unmarked, whatever the hashes.

    Two scatters instead of a sort: the first of every slot is marked, then the first of every slot among those that met
    another hash in the first round.
    """
    first = _first_of_slot(hashes)
    index = np.arange(len(hashes))
    is_first: NDArray[np.bool_] = first == index
    met_other = np.flatnonzero(hashes[first] != hashes)
    if len(met_other):
        shifted = hashes[met_other] >> np.uint64(32)
        is_first[met_other] = _first_of_slot(shifted) == index[: len(met_other)]
    return is_first


def _first_of_slot(hashes: Hashes) -> Positions:
    """For each hash, the index of the first one in the same slot of a table, whose index are the lower bits."""
    num_slots = 1 << (_SLOTS_PER_HASH * len(hashes)).bit_length()
    slots = (hashes & np.uint64(num_slots - 1)).view(np.int64)
    first = np.empty(num_slots, np.int64)
    # Of equal indices the last assignment stays.
    first[slots[::-1]] = np.arange(len(hashes) - 1, -1, -1)
    return first[slots]


def _proposals(targets: Positions, hits: Hits, arena: TokenArena) -> Runs:
    """Join hits of one donor and diagonal that are near each other into intervals to verify.

    The outer anchors of a run lie within a window of its ends, so an interval a window longer mostly holds all of it.
    """
    diagonals = arena.starts[hits.rows] + hits.positions - targets
    order = np.argsort(diagonals, kind="stable")
    targets, diagonals, rows = targets[order], diagonals[order], hits.rows[order]
    breaks = (np.diff(diagonals) != 0) | (np.diff(rows) != 0) | (np.diff(targets) > _MERGE_GAP)
    heads = np.flatnonzero(np.concatenate([[True], breaks])) if len(order) else order
    tails = np.append(heads[1:], len(order)) - 1 if len(order) else order
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
