"""What the scheduler's half remembers of a request that vLLM has not finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED, StoredPrefix
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.report import request_report, worst_report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.messages import BlockIds, GraftOutcome
    from kvgraft.integrations.vllm.scheduler.claims import Claim
    from kvgraft.integrations.vllm.scheduler.donor_registry import CapturedText
    from kvgraft.integrations.vllm.scheduler.private_hashes import PrivateBlockHashes
    from kvgraft.types import GraftReport, Miss, Namespace, Substitution


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from a lookup to the next, or to its end: vLLM may begin it again.

    Attributes:
        request_id: vLLM's name.
        namespace: Who may share with it.
        token_ids: int32, all tokens at the lookup.
        num_prompt_tokens: How many of them are the prompt.
        exact_len: What vLLM's prefix cache gave at the lookup.
        stored: What a store beside us gives behind that; nothing where a graft is claimed.
        lineage: Where its K/V come from.
        claim: The graft, or None.
        cold_tokens: Tokens of the claim that are read from stores.
        void: A graft that vLLM was promised and that cannot be made any more.
        miss: Why there is none.
        substitution: Set if the graft copies other text.
        captures: Whether its text may become donors.
        lookup_ms: Duration of the lookup.
        is_admitted: vLLM has given it blocks since the lookup.
        is_stale: What the lookup found is gone; it is looked up anew before it is admitted.
        is_pinned: The claim's donors are kept for it.
        failure: Why a graft of it failed, which is not tried again; None if none has.
        block_ids: Its blocks, group by group, as far as they were ever given.
        prompt: Text that the engine computes and workers capture.
        output: Generated text, captured in chunks; registered at the end.
        gaps: Text of the prompt that the graft computes and captures.
        outcome: What workers told of the graft.
        hashes: Hashes of its blocks, if it was ever to be grafted.
        before: Its report when vLLM began it again.
    """

    request_id: str
    namespace: Namespace
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    exact_len: int
    lineage: Lineage
    stored: StoredPrefix = NOTHING_STORED
    claim: Claim | None = None
    cold_tokens: int = 0
    void: Claim | None = None
    miss: Miss | None = None
    substitution: Substitution | None = None
    captures: bool = False
    lookup_ms: float = 0.0
    is_admitted: bool = False
    is_stale: bool = False
    is_pinned: bool = False
    failure: Miss | None = None
    block_ids: list[list[int]] = field(default_factory=list)
    prompt: CapturedText | None = None
    output: CapturedText | None = None
    gaps: list[CapturedText] = field(default_factory=list)
    outcome: GraftOutcome | None = None
    hashes: PrivateBlockHashes | None = None
    before: GraftReport | None = None

    def waits_for_room(self, exact_len: int, num_tokens: int) -> bool:
        """Whether vLLM asks for what it was told before: it does in every step until it has blocks to give."""
        return not (self.is_admitted or self.is_stale) and (self.exact_len, len(self.token_ids)) == (
            exact_len,
            num_tokens,
        )

    @property
    def given_len(self) -> int:
        """Positions that vLLM does not compute though no graft makes them."""
        return self.exact_len + self.stored.num_tokens

    @property
    def waits_for_graft(self) -> bool:
        """Whether workers have a graft of it and have not told what became of it."""
        return self.is_admitted and self.claim is not None and self.outcome is None

    @property
    def texts(self) -> list[CapturedText]:
        """Everything that is being captured of it."""
        return [text for text in (self.prompt, self.output, *self.gaps) if text is not None]

    def take_stored(self, stored: StoredPrefix) -> None:
        """Note that a store gives what vLLM's own cache has not."""
        self.stored = stored
        if stored.num_tokens and self.before is None:
            self.lineage = Lineage(self.given_len)
        self.captures &= stored.asynchronous

    def blocks_to(self, stop: int, block_sizes: tuple[int, ...]) -> BlockIds:
        """The blocks of positions `[0, stop)`."""
        return tuple(tuple(ids[: -(-stop // size)]) for ids, size in zip(self.block_ids, block_sizes, strict=True))

    def add_blocks(self, blocks: tuple[list[int], ...] | None, *, replace: bool) -> None:
        """Take further blocks, or all of them anew."""
        if replace:
            self.block_ids = [list(ids) for ids in blocks or ()]
        elif blocks is not None:
            for known, more in zip(self.block_ids, blocks, strict=True):
                known.extend(more)

    def report(self, policy: str) -> GraftReport:
        """What was reused for the prompt, told of the worst attempt at it."""
        timings = {"lookup": self.lookup_ms}
        corrected = 0
        if self.outcome is not None:
            corrected = self.outcome.corrected_tokens
            timings |= {"graft": self.outcome.inject_ms, "recompute": self.outcome.compute_ms}
            timings |= {"read": self.outcome.read_ms} if self.cold_tokens else {}
        report = request_report(
            self.lineage,
            self.num_prompt_tokens,
            policy=policy,
            corrected_tokens=corrected,
            timings_ms=timings,
            miss=self.miss,
            substitution=self.substitution,
        )
        return report if self.before is None else worst_report((report, self.before))
