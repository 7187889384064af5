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

_WORK_PER_TOKEN = 8
"""Token pairs per prompt token up to which everything that is proposed is verified at once."""


def find_runs(hashes: Hashes, targets: Positions, hits: Hits, arena: TokenArena, verifier: Verifier) -> Runs:
    """Verify what the index proposes.

    A k-gram that a prompt repeats proposes every occurrence with every posting, quadratically many diagonals for text
    that is periodic. Where that would be too much work, the first occurrence goes first, and a later one only where no
    run was found.

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
    proposals = _proposals(positions, hits, arena)
    if proposals.num_tokens <= _WORK_PER_TOKEN * verifier.num_tokens:
        return verifier.runs_in(proposals)
    is_first = np.zeros(len(hashes), np.bool_)
    is_first[np.unique(hashes, return_index=True)[1]] = True
    later = ~is_first[hits.query]
    runs = verifier.runs_in(_proposals(positions[~later], hits.where(~later), arena))
    later[later] = ~_covered(positions[later], runs, verifier.num_tokens)
    return runs.joined(verifier.runs_in(_proposals(positions[later], hits.where(later), arena)))


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
