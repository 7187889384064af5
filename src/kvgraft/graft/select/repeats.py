"""Copied text that the prompt says before the copy, too.

A model reads a text that it has just read differently: attention goes to what followed the first time. K/V that were
computed where the text was new lack that, in all tokens alike, and the answer looks at them. So they are corrected by the
mean movement of those that are computed again (`KernelRidge.twice`). A mean wants a number of tokens, no share:
`MOST_COUNTED` of them count `REPEAT_WEIGHT` times (`docs/fidelity.md`, docs/adr/0018).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

REPEAT_WEIGHT = 3
"""A repeated token counts as so many where a share of tokens is computed again."""
MOST_COUNTED = 64
"""So many of a prompt's repeated tokens count thus, the others once."""
_RUN = 16
"""Tokens in a row that make a repeat: shorter ones are common words."""
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd, one for each doubling of a hashed run (constants of splitmix64 and of its kin)."""


def repeated(token_ids: NDArray[np.integer], shifted: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which positions of a prompt are copied from elsewhere and stand in it before the span that copies them.

    Args:
        token_ids: The prompt, integers (n,).
        shifted: Start and length of what is copied from elsewhere.

    Returns:
        bool (n,). Runs of 16 tokens are compared by hash: this decides how much is computed again, nothing else.

    Complexity: O(n log n); nothing is hashed where no span begins late enough to repeat anything.
    """
    found = np.zeros(len(token_ids), np.bool_)
    late = [(start, length) for start, length in shifted if start >= _RUN and length >= _RUN]
    if not late:
        return found
    hashes = _hashes_of_runs(token_ids[: max(start + length for start, length in late)])
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first_seen = first[inverse]
    for start, length in late:
        begins = np.flatnonzero(first_seen[start : start + length - _RUN + 1] + _RUN <= start)
        edges = np.zeros(length + 1, np.int64)
        edges[begins] += 1
        edges[begins + _RUN] -= 1
        found[start : start + length] |= np.cumsum(edges)[:-1] > 0
    return found


def says_much_twice(token_ids: NDArray[np.integer], shifted: Sequence[tuple[int, int]]) -> bool:
    """Whether a quarter of what is copied from elsewhere is repeated: the first token then waits for the repair."""
    num_shifted = sum(length for _, length in shifted)
    return num_shifted > 0 and 4 * int(repeated(token_ids, shifted).sum()) >= num_shifted


def _hashes_of_runs(token_ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return the hash of every run of 16 tokens, uint64 (n - 15,), each from those of its halves."""
    hashes = token_ids.astype(np.uint64)
    for doubling, factor in enumerate(_FACTORS):
        first, second = hashes[: -(1 << doubling)], hashes[1 << doubling :]
        hashes = (first * np.uint64(factor)) ^ (second + (first >> np.uint64(29)))
    return hashes
