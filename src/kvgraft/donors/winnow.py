"""The selection step of winnowing: values that are the smallest of some window.

Source: S. Schleimer, D. Wilkerson, A. Aiken, "Winnowing: local algorithms for document fingerprinting", SIGMOD 2003.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.uint32]


def window_minima(values: Values, window: int, spares: Values) -> NDArray[np.int64]:
    """Return ascending positions of the values that are the smallest of some window; of equal ones all.

    Args:
        values: At least `window` of them.
        window: Neighbours that are compared, counted with the value itself.
        spares: Three rows of `len(values) + window - 1` to work in.

    Complexity: O(n log window), vectorised.
    """
    margin = window - 1
    padded, first, second = spares[:, : len(values) + margin]
    padded[:margin] = 0
    padded[len(values) :] = 0
    padded[margin : len(values)] = _sliding(np.minimum, values, window, first, second)
    # A value is no less than the minimum of any window around it; it is one of them if it is the largest of those.
    return np.flatnonzero(values == _sliding(np.maximum, padded, window, first, second))


def _sliding(reduce: np.ufunc, values: Values, window: int, target: Values, spare: Values) -> Values:
    """Reduce every window of `values` with an idempotent ufunc, in turn into `target` and `spare`."""
    done = 1
    while done < window:
        step = min(done, window - done)
        values = reduce(values[:-step], values[step:], out=target[: len(values) - step])
        target, spare = spare, target
        done += step
    return values
