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
    is_first = _first_occurrences(hashes[hits.query], hits.query)
    if is_first is None:
        return verifier.runs_in(_proposals(positions, hits, arena))
    runs = verifier.runs_in(_proposals(positions[is_first], hits.where(is_first), arena))
    is_left = ~is_first & ~_covered(positions, runs)
    if not is_left.any():
        return runs
    return runs.joined(verifier.runs_in(_proposals(positions[is_left], hits.where(is_left), arena)))


def _first_occurrences(hashes: Hashes, query: Positions) -> NDArray[np.bool_] | None:
    """Mark hits whose anchor is the first in the prompt with its hash; None if all are.

    Args:
        hashes: Hash of each hit, by ascending `query`.
        query: Index of each hit's anchor.
    """
    order = np.argsort(hashes, kind="stable")
    changes = hashes[order][1:] != hashes[order][:-1]
    is_head = np.concatenate([[True], changes]) if len(order) else changes
    ordered = query[order]
    first = ordered[is_head][np.cumsum(is_head) - 1]
    same = ordered == first
    if same.all():
        return None
    is_first = np.empty(len(query), np.bool_)
    is_first[order] = same
    return is_first


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


def _covered(positions: Positions, runs: Runs) -> NDArray[np.bool_]:
    """Tell which k-grams at `positions` lie in a run."""
    kept = undominated(runs.starts, runs.ends)
    starts, ends = runs.starts[kept], runs.ends[kept]
    last = np.searchsorted(starts, positions, side="right") - 1
    return (last >= 0) & (np.append(ends, 0)[last] >= positions + GRAM_TOKENS)
