"""Contract of providers, which find a stored prompt that resembles another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.types import TokenArray


@dataclass(frozen=True, slots=True)
class SemanticPrefixResult:
    """Proposal of a provider for a prompt of which little is stored."""

    alternate_token_ids: Sequence[int]
    """Tokens of a stored prompt with K/V that may stand in for the query's."""
    num_cached_tokens: int
    """How many of them are meant; 0 leaves it to the cache."""
    skip_insert: bool = True
    """Whether the request must not be stored. Substituted K/V is never stored either way: False is refused by a warning."""
    metadata: Mapping[str, object] | None = None
    source_id: str = ""
    """Name of the donor, for logs and reports."""


class SemanticPrefixProvider(ABC):
    """Finds a stored prompt that resembles another one. Called in the path of a request: be quick."""

    @abstractmethod
    def on_prefix_miss(self, rid: str, token_ids: TokenArray) -> SemanticPrefixResult | None:
        """Propose a stored prompt for `token_ids` (int64 (n,), the original ones, read-only), or None."""

    @abstractmethod
    def on_request_cached(self, rid: str, token_ids: TokenArray) -> None:
        """Hear that exactly `token_ids` (int64 (n,), read-only) were stored by a finished request."""

    def on_init(self, model_config: object = None) -> None:  # noqa: B027 (optional)
        """Prepare; called once, by an engine with what it knows of its model, by `set_semantic_provider` without."""

    def on_shutdown(self) -> None:  # noqa: B027 (optional)
        """Give back resources; an engine calls it when it ends, otherwise its owner does."""
