"""Places of donors' K/V: under a token key in SGLang's radix tree, or in a block of our host store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors.front import front_digest

if TYPE_CHECKING:
    from array import array

    from kvgraft.types import Namespace


STORE = "a store"
"""In place of the unknown request that computed a text which was read from a store."""


class Origin(NamedTuple):
    """The computation of a text.

    Attributes:
        request: SGLang's id of the request, or `STORE`.
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
        generation: 0 if it attended to exact K/V only, else 1 + the highest generation it attended to.
        origin: What computed it.
        front: See `Donor`; of the text from its first token on.
    """

    tokens: array[int]
    namespace: Namespace
    extra_key: str | None
    cache_salt: str | None
    base: int
    generation: int
    origin: Origin
    front: bytes = b""

    def front_at(self, index: int) -> bytes:
        """`front` of the part that begins with token `index`, as far as the text alone shows it."""
        if index == 0:
            return self.front
        return b"" if self.base else front_digest(self.namespace.key, np.frombuffer(self.tokens[:index], np.int64))


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
