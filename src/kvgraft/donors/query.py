"""What is looked for among donors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import ArrayLike

    from kvgraft.donors.fingerprint import Tokens
    from kvgraft.types import DonorId, KeyedNamespace, Namespace


@dataclass(frozen=True, slots=True, eq=False)
class DonorQuery:
    """A prompt, and the donors that count for it.

    Attributes:
        namespace: Only its donors are considered.
        token_ids: The prompt, one-dimensional; integers that fit into 32 bits.
        start: Length of the exact prefix; matches are clipped to what follows.
        max_generation: Highest generation of a donor; None for any.
        proposed: Donors that may have some of the text although the indexes have lost it. Their anchors are compared with
            the prompt's directly, in O(n log n) of their tokens; those of other namespaces, of a higher generation and
            those that are gone are ignored.
        with_stored: Whether donors count whose K/V lie in stores alone. Of equal runs of one generation the resident one is
            taken.
    """

    namespace: Namespace | KeyedNamespace
    token_ids: ArrayLike
    start: int = 0
    max_generation: int | None = None
    proposed: Collection[DonorId] = ()
    with_stored: bool = True

    @property
    def tokens(self) -> Tokens:
        """The prompt as int32; raises `ConfigError`."""
        return as_tokens(self.token_ids)


def as_tokens(token_ids: ArrayLike) -> Tokens:
    """Return int32 tokens; refuse what would change value, for a wrapped id would match another token."""
    given = np.asarray(token_ids)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ConfigError("token ids must be a one-dimensional sequence of integers")
    tokens: Tokens = given.astype(np.int32, copy=False)
    if tokens is not given and (tokens != given).any():
        raise ConfigError("token ids must fit into 32 bits")
    return tokens
