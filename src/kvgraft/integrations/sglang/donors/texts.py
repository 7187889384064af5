"""Places of donors' K/V: under a token key in SGLang's radix tree, or in a block of our host store."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors.front import front_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.types import Namespace


STORE = "a store"
"""In place of the unknown request that computed a text which was read from a store."""
UNKNOWN = "unknown"
"""In place of a request that was not noted, as where memory ran out."""


class Origin(NamedTuple):
    """The computation of a text.

    Attributes:
        request: SGLang's id of the request, `STORE` or `UNKNOWN`.
        attempt: How often the request had been retracted before.
    """

    request: str
    attempt: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TreeText:
    """A path in the radix tree, named by its tokens and never by slots, which go stale.

    Attributes:
        tokens: The path from the root of `extra_key` and `cache_salt` on; never changed.
        namespace: Who may reuse it.
        extra_key: SGLang's name of a subtree; a name of our own for text that exact requests must never hit.
        cache_salt: SGLang's second name of a subtree.
        base: Position at which the first token was encoded.
        generation: Highest that it attended to; 0 if that was exact K/V only.
        origin: What computed it.
        before: Tokens in front of the path's, after which these were encoded.
        is_shared: Other requests may give the tree the same path, with other K/V, once this one is evicted.
    """

    tokens: array[int]
    namespace: Namespace
    extra_key: str | None
    cache_salt: str | None
    base: int
    generation: int
    origin: Origin
    before: array[int] = field(default_factory=partial(array, "q"))
    is_shared: bool = False

    def before_at(self, index: int) -> NDArray[np.int64]:
        """Return all tokens before the part that begins with token `index`, `(base + index,)`."""
        return np.array(self.before + self.tokens[:index], np.int64)

    def front_at(self, index: int) -> bytes:
        """`front` (see `Donor`) of the part that begins with token `index`. O(tokens before it)."""
        return front_digest(self.namespace.key, self.before_at(index))


@dataclass(frozen=True, slots=True, eq=False)
class TreeKV:
    """Handle of a donor that is part of a `TreeText`: its first token is `text.tokens[offset]`."""

    text: TreeText
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class HostBlockKV:
    """Handle of a donor in the host store."""

    store_key: int
    origin: Origin
