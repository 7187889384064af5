"""Names under which engines keep what requests go on from: approximate K/V in their own places.

A request that copied something leaves K/V that no exact prefix cache may have, and that the next turn of its conversation
goes on from all the same: they stand at the same positions after the same text, and are what the answer was drawn from.
Engines keep them where they keep exact prefixes, under other names, for which only requests ask that accept copies.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from kvgraft.types import KeyedNamespace, Namespace


def continuation_key(namespace: Namespace | KeyedNamespace, generation: int) -> bytes:
    """Return the key, 16 bytes like a namespace's own, of text whose K/V are of `generation` at most, above 0.

    The name says how often the text was copied, so that what is computed after it is known to be of that generation, too.
    """
    assert generation > 0, "text of generation 0 is exact"
    digest = hashlib.blake2b(digest_size=16, key=namespace.key, person=b"kvgraft.goes_on")
    digest.update(generation.to_bytes(4, "little"))
    return digest.digest()


def may_go_on(mode: ReuseMode) -> bool:
    """Whether a request of this mode takes approximate K/V that an earlier one has left in their places."""
    return mode in (ReuseMode.GRAFT, ReuseMode.SUBSTITUTE)
