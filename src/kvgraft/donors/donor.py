"""A registered text whose K/V can be copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """

    donor_id: DonorId
    namespace: Namespace | KeyedNamespace
    token_ids: Tokens
    kv: object
    generation: int = 0
    start_position: int = 0

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return len(self.token_ids)
