"""Requests that vLLM has not finished: an attempt, and what vLLM gave it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED, StoredPrefix

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import PrefillStats

    from kvgraft.integrations.vllm.messages import BlockIds
    from kvgraft.integrations.vllm.scheduler.holdings import RegistryHoldings
    from kvgraft.integrations.vllm.scheduler.private_hashes import PrivateBlockHashes
    from kvgraft.reuse.attempt import AskedPrompt, Attempt
    from kvgraft.reuse.claim import Claim


@dataclass(slots=True, eq=False)
class VLLMRequest:
    """One attempt at a request, from a lookup to the next or to its end, in vLLM's terms.

    Attributes:
        attempt: What was decided, and how far that is.
        held: Pinned donors, and room for text.
        keeps_text: Its text may become donors.
        stored: Exact tokens that another connector's store loads; nothing where a graft is claimed.
        block_ids: Blocks by group, as far as they were ever given.
        is_promised: vLLM was answered with the tokens of its graft, and may give it blocks at any time.
        is_whole: A step was scheduled that computes the last position of its prompt.
        hashes: Hashes of its blocks, once it was to be grafted.
        prefill: vLLM's counts of its first prefill, while they may be corrected (`usage.py`).
        sent: The report as the client gets it, once the request has ended.
        is_reported: Not where an earlier attempt was lost by a failure: it may have been worse than all that are known.
    """

    attempt: Attempt
    held: RegistryHoldings
    keeps_text: bool = False
    stored: StoredPrefix = NOTHING_STORED
    block_ids: list[list[int]] = field(default_factory=list)
    is_promised: bool = False
    is_whole: bool = False
    hashes: PrivateBlockHashes | None = None
    prefill: PrefillStats | None = None
    sent: dict[str, object] = field(default_factory=dict)
    is_reported: bool = True

    @property
    def prompt(self) -> AskedPrompt:
        """As vLLM asks for it."""
        return self.attempt.prompt

    @property
    def request_id(self) -> str:
        """Name that vLLM gave the request."""
        return self.attempt.prompt.request_id

    @property
    def claim(self) -> Claim | None:
        """The graft, if one is promised or made."""
        return self.attempt.claim

    @property
    def prefix_len(self) -> int:
        """Positions that vLLM does not compute though no graft makes them."""
        return self.prompt.cached_len + self.stored.num_tokens

    def answers(self, cached_len: int, num_tokens: int, stored: StoredPrefix) -> bool:
        """Whether vLLM asks once more for what was decided, as it does in every step until it has blocks to give."""
        asked = (self.prompt.cached_len, len(self.prompt.token_ids), self.stored)
        return self.attempt.is_waiting and asked == (cached_len, num_tokens, stored)

    def blocks_to(self, stop: int, block_sizes: tuple[int, ...]) -> BlockIds:
        """Return the blocks of positions `[0, stop)`."""
        return tuple(tuple(ids[: -(-stop // size)]) for ids, size in zip(self.block_ids, block_sizes, strict=True))

    def add_blocks(self, blocks: tuple[list[int], ...] | None, *, replace: bool) -> None:
        """Take further blocks, or all of them anew."""
        if replace:
            self.block_ids = [list(ids) for ids in blocks or ()]
        elif blocks is not None:
            for known, more in zip(self.block_ids, blocks, strict=True):
                known.extend(more)


class ScheduledRows(NamedTuple):
    """A request, and the positions `[start, stop)` that a step computes of it, without drafts."""

    state: VLLMRequest
    start: int
    stop: int
