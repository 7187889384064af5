"""Checksums of pages of rows. Needs the extra `store`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.memory.store.record import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


def page_checksums(rows: NDArray[np.uint8], key: str, first_page: int = 0) -> NDArray[np.uint64]:
    """xxh3 of every page, seeded by its object and its place there: a page of another text or place does not pass.

    Args:
        rows: Contiguous rows that begin with page `first_page`.
        key: Name of the object.
        first_page: Number of the first page.

    Raises:
        ImportError: The extra `store` is not installed.
    """
    digest = _xxh3()
    seed = int(key[:16], 16)
    pages = [rows[start : start + PAGE_TOKENS] for start in range(0, len(rows), PAGE_TOKENS)]
    sums = [digest(page.data, (seed + first_page + number) % (1 << 64)) for number, page in enumerate(pages)]
    return np.array(sums, np.uint64)


def _xxh3() -> Callable[[memoryview, int], int]:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError("stores of donors need xxhash: pip install 'kvgraft[store]'") from error
    return xxh3_64_intdigest
