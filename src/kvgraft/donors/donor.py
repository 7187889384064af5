"""Texts with K/V that can be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.front import front_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.donors.fingerprint import Tokens
    from kvgraft.types import DonorId, KeyedNamespace, Namespace


@dataclass(frozen=True, slots=True, eq=False)
class DonorText:
    """A text that is about to become a donor; for the fields see `Donor`."""

    namespace: Namespace | KeyedNamespace
    token_ids: NDArray[np.integer]
    generation: int = 0
    start_position: int = 0
    front: bytes = b""
    before: NDArray[np.integer] | None = None
    """All tokens before it, where they are known; no donor keeps them."""

    @classmethod
    def of_run(cls, namespace: Namespace, token_ids: NDArray[np.integer], run: tuple[int, int, int]) -> DonorText:
        """Take `(start, stop, generation)` of a request's tokens."""
        start, stop, generation = run
        before = token_ids[:start]
        return cls(namespace, token_ids[start:stop], generation, start, front_digest(namespace.key, before), before)

    @classmethod
    def joined(cls, parts: Sequence[Donor]) -> DonorText:
        """Take the text of donors that continue one another and are of one generation."""
        first = parts[0]
        token_ids = np.concatenate([part.token_ids for part in parts])
        return cls(first.namespace, token_ids, first.generation, first.start_position, first.front)


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """Text with K/V that a real forward pass computed."""

    donor_id: DonorId
    """Never given out twice."""
    namespace: Namespace | KeyedNamespace
    """Who may reuse it."""
    token_ids: Tokens
    """Read-only int32 `(num_tokens,)`."""
    kv: object
    """Handle of the K/V, meaningful to the owner alone."""
    generation: int = 0
    """Highest that the text attended to; 0 if that was exact K/V only. A copy to another place is of one more."""
    start_position: int = 0
    """Position of the first token when it was encoded."""
    front: bytes = b""
    """`front_digest` of the text before it then; empty if there was none, or if it is not known."""

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return len(self.token_ids)

    def front_at(self, index: int) -> bytes:
        """Return `front` of the part from token `index` on; empty where the donor alone does not show it."""
        if index == 0:
            return self.front
        return b"" if self.start_position else front_digest(self.namespace.key, self.token_ids[:index])
