"""A prompt as an engine asks for it, and what its own cache has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.reuse.lineage import Lineage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.types import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompt:
    """A prompt as an engine asks for it.

    `token_ids` (int32) are all tokens at the lookup, the first `num_prompt_tokens` of them the prompt; the engine's own
    prefix cache has `cached_len` of them, those from `exact_len` on approximate and of `generation`. The answer has
    `max_tokens` at most. A session goes on with further input, in place of the last token of the answer, of which K/V may
    have been captured: its answers become no donors.
    """

    request_id: str
    namespace: Namespace
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    cached_len: int
    max_tokens: int | None = None
    is_session: bool = False
    exact_len: int = 0
    generation: int = 0

    @property
    def text(self) -> NDArray[np.int32]:
        """The prompt's own tokens."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_generated(self) -> int:
        """Tokens of the answer that are known: of a request that begins again some may be."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prefix_len(self) -> int:
        """Cached tokens of the prompt itself: of a request that begins again, an answer may be cached too."""
        return min(self.cached_len, len(self.text))

    def lineage(self) -> Lineage:
        """Return the lineage of what the engine's cache has of it."""
        lineage = Lineage(self.exact_len)
        self._go_on(lineage)
        return lineage

    def lineage_after(self, earlier: Lineage, page_size: int) -> Lineage:
        """Return the lineage as the request begins again: what the cache gives back has the class that it had before.

        Unless others have left more than it had itself, in whole pages of `page_size` tokens: then it goes on from that. And
        what it computed between its copies others may have copied: text and generation name pages, of any request.
        """
        earlier.restart(self.cached_len)
        exact_pages = earlier.exact_len(self.cached_len) // page_size
        if exact_pages * page_size > self.exact_len or earlier.generation_at(self.cached_len) < self.generation:
            earlier.restart(self.exact_len)
            self._go_on(earlier)
        elif self.generation:
            for run in list(earlier.computed_runs(self.exact_len, self.prefix_len)):
                earlier.go_on(run.stop, self.generation, start=run.start)
        return earlier

    def _go_on(self, lineage: Lineage) -> None:
        if self.prefix_len > self.exact_len:
            lineage.go_on(self.prefix_len, self.generation, start=self.exact_len)
