"""The contract of those who find a stored prompt that resembles another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.types import TokenArray


@dataclass(frozen=True, slots=True)
class SemanticPrefixResult:
    """What a provider proposes for a prompt of which little is stored.

    Attributes:
        alternate_token_ids: Tokens of a stored prompt whose K/V may stand in for the query's.
        num_cached_tokens: How many of them are meant; 0 leaves it to the cache.
        skip_insert: Whether the request must not be stored. Substituted K/V is never stored either way: False is refused by
            a warning.
        metadata: Travels to the request's report.
        source_id: Name of the donor, for logs and reports.
    """

    alternate_token_ids: Sequence[int]
    num_cached_tokens: int
    skip_insert: bool = True
    metadata: Mapping[str, object] | None = None
    source_id: str = ""


class SemanticPrefixProvider(ABC):
    """Finds a stored prompt that resembles another one. Called in the path of a request: be quick."""

    @abstractmethod
    def on_prefix_miss(self, rid: str, token_ids: TokenArray) -> SemanticPrefixResult | None:
        """Propose a stored prompt for `token_ids` (the original ones, read-only), or None."""

    @abstractmethod
    def on_request_cached(self, rid: str, token_ids: TokenArray) -> None:
        """Hear that exactly `token_ids` (read-only) were stored by a finished request."""

    def on_init(self, model_config: object = None) -> None:  # noqa: B027 (optional)
        """Prepare; called once, by an engine with what it knows of its model, by `set_semantic_provider` without."""

    def on_shutdown(self) -> None:  # noqa: B027 (optional)
        """Give back resources; an engine calls it when it ends, otherwise whoever owns the provider does."""
