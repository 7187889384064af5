"""A registered text whose K/V can be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.donors.front import front_digest

if TYPE_CHECKING:
    from kvgraft.donors.fingerprint import Tokens
    from kvgraft.types import DonorId, KeyedNamespace, Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """Text with K/V that a real forward pass computed.

    Attributes:
        donor_id: Never given out twice.
        namespace: Who may reuse it.
        token_ids: Read-only int32 `(num_tokens,)`.
        kv: Handle of the K/V, meaningful to the owner alone.
        generation: 0 if the text attended to exact K/V only, else 1 + the highest generation it attended to.
        start_position: Position of the first token when it was encoded.
        front: `front_digest` of what stood in front of it then; empty if nothing did, or if it is not known.
    """

    donor_id: DonorId
    namespace: Namespace | KeyedNamespace
    token_ids: Tokens
    kv: object
    generation: int = 0
    start_position: int = 0
    front: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return len(self.token_ids)

    def front_at(self, index: int) -> bytes:
        """`front` of the part that begins with token `index`, as far as it can be told from the donor alone."""
        if index == 0:
            return self.front
        return b"" if self.start_position else front_digest(self.namespace.key, self.token_ids[:index])
