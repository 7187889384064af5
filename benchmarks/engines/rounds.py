"""What scripts that measure in interleaved rounds share: texts that nobody has seen, and ratios of medians over rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESAMPLES = 4_000
_VOCABULARY = (1_000, 40_000)


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Draw a text that nobody has seen."""
    return [int(token) for token in rng.integers(*_VOCABULARY, count)]


def ratio_of_medians(mine: Sequence[float], theirs: Sequence[float], seed: int) -> tuple[float, tuple[float, float]]:
    """Return the ratio of two medians over the same rounds, and its bootstrapped 95 % interval."""
    ours, others = np.asarray(mine), np.asarray(theirs)
    drawn = np.random.default_rng(seed).integers(len(ours), size=(_RESAMPLES, len(ours)))
    ratios = np.median(ours[drawn], axis=1) / np.median(others[drawn], axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(np.median(ours) / np.median(others)), (float(low), float(high))
