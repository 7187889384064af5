"""Requests that vLLM has not finished, as the scheduler's half of the connector follows them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.scheduler.claims import Claim
from kvgraft.integrations.vllm.scheduler.holdings import RegistryHoldings
from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED, StoredPrefix
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.report import request_report, worst_report
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.metrics.stats import PrefillStats

    from kvgraft.integrations.vllm.messages import BlockIds, GraftOutcome
    from kvgraft.integrations.vllm.scheduler.private_hashes import PrivateBlockHashes
    from kvgraft.types import GraftReport, Namespace, RepairReport


class AttemptPhase(Enum):
    """Progress of an attempt."""

    WAITING = "waiting"
    """Looked up, without blocks: vLLM asks again in every step until it has some to give."""
    STALE = "stale"
    """As `WAITING`, but the donors that the lookup found are gone: it is looked up anew, or its load fails at once."""
    RUNNING = "running"
    """Has blocks, and no graft under way."""
    GRAFTING = "grafting"
    """Has blocks; workers make its graft and have not reported."""


class RepairPhase(Enum):
    """Progress of a repair after the first token."""

    NONE = "none"
    """Nothing is left to repair, or nothing will be."""
    DUE = "due"
    """Workers have what they need for it, or will have; it goes out with the step of the second token."""
    SENT = "sent"
    """Workers have the command and have not reported."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompt:
    """A prompt as vLLM asks for it.

    `token_ids` (int32) are all tokens at the lookup, the first `num_prompt_tokens` of them the prompt; vLLM's own prefix
    cache has `cached_len` of them, those from `exact_len` on approximate and of `generation`. The answer has `max_tokens` at
    most. A session goes on with further input, in place of the last token of the answer, of which K/V may have been captured:
    its answers become no donors.
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

    def go_on(self, lineage: Lineage) -> None:
        """Note in a lineage what the prompt goes on from."""
        if self.prefix_len > self.exact_len:
            lineage.go_on(self.prefix_len, self.generation, start=self.exact_len)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer that are known: of a request that begins again some may be."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prefix_len(self) -> int:
        """Cached tokens of the prompt itself: of a request that begins again, an answer may be cached too."""
        return min(self.cached_len, len(self.text))


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """The answer to a lookup, replaced whole when something else becomes true.

    Attributes:
        graft: The graft that is promised, or why there is none.
        lookup_ms: Duration of the lookup.
        keeps_text: The request's text may become donors.
        stored: Exact tokens that another connector's store loads; nothing where a graft is claimed.
    """

    graft: Claim | Miss
    lookup_ms: float = 0.0
    keeps_text: bool = False
    stored: StoredPrefix = NOTHING_STORED


UNDECIDED = Decided(Miss(MissReason.NO_MATCH, "nothing was grafted"))


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """Report of the attempts that had blocks, and why a graft of them failed: it is not tried again."""

    report: GraftReport | None = None
    failure: Miss | None = None


@dataclass(slots=True, eq=False)
class VLLMRequest:
    """One attempt at a request, from a lookup to the next or to its end.

    Attributes:
        lineage: Origin of its K/V; one object for all attempts.
        held: Pinned donors, and room for text.
        block_ids: Blocks by group, as far as they were ever given.
        is_promised: vLLM was answered with the tokens of its graft, and may give it blocks at any time.
        is_whole: A step was scheduled that computes the last position of its prompt.
        repair: When the policy's choice is computed, as far as it is known; None if there is none.
        hashes: Hashes of its blocks, once it was to be grafted.
        prefill: vLLM's counts of its first prefill, while they may be corrected (`usage.py`).
        sent: The report as the client gets it, once the request has ended.
        is_reported: Not where an earlier attempt was lost by a failure: it may have been worse than all that are known.
    """

    prompt: AskedPrompt
    lineage: Lineage
    held: RegistryHoldings
    earlier: Earlier = Earlier()
    decided: Decided = UNDECIDED
    phase: AttemptPhase = AttemptPhase.WAITING
    block_ids: list[list[int]] = field(default_factory=list)
    is_promised: bool = False
    is_whole: bool = False
    outcome: GraftOutcome | None = None
    repair: RepairReport | None = None
    repair_phase: RepairPhase = RepairPhase.NONE
    hashes: PrivateBlockHashes | None = None
    prefill: PrefillStats | None = None
    sent: dict[str, object] = field(default_factory=dict)
    is_reported: bool = True

    @property
    def request_id(self) -> str:
        """Name that vLLM gave the request."""
        return self.prompt.request_id

    @property
    def claim(self) -> Claim | None:
        """The graft, if one is promised or made."""
        return self.decided.graft if isinstance(self.decided.graft, Claim) else None

    @property
    def is_admitted(self) -> bool:
        """Whether vLLM has given it blocks since the lookup."""
        return self.phase in (AttemptPhase.RUNNING, AttemptPhase.GRAFTING)

    @property
    def waits_for_graft(self) -> bool:
        """Whether workers have a graft of it and have not reported its outcome."""
        return self.phase is AttemptPhase.GRAFTING

    @property
    def prefix_len(self) -> int:
        """Positions that vLLM does not compute though no graft makes them."""
        return self.prompt.cached_len + self.decided.stored.num_tokens

    def again(self, prompt: AskedPrompt, policy: str, block_size: int) -> VLLMRequest:
        """Give everything back and return the next attempt; what vLLM's cache gives it has the class that it had before.

        Unless others have left more than it had itself: then it goes on from that. Names are of blocks of `block_size`
        tokens.
        """
        self.held.release()
        earlier = replace(self.earlier, report=self.report(policy)) if self.is_admitted else self.earlier
        lineage = Lineage(prompt.exact_len) if earlier.report is None else self.lineage
        lineage.restart(prompt.cached_len)
        exact_blocks = lineage.exact_len(prompt.cached_len) // block_size
        if exact_blocks * block_size > prompt.exact_len or lineage.generation_at(prompt.cached_len) < prompt.generation:
            lineage.restart(prompt.exact_len)
            prompt.go_on(lineage)
        held = RegistryHoldings(self.held.registry)
        return VLLMRequest(prompt, lineage, held, earlier, hashes=self.hashes, is_reported=self.is_reported)

    def answers(self, cached_len: int, num_tokens: int, stored: StoredPrefix) -> bool:
        """Whether vLLM asks once more for what was decided, as it does in every step until it has blocks to give."""
        asked = (self.prompt.cached_len, len(self.prompt.token_ids), self.decided.stored)
        return self.phase is AttemptPhase.WAITING and asked == (cached_len, num_tokens, stored)

    def miss(self, miss: Miss) -> None:
        """Replace the graft by a miss."""
        self.decided = replace(self.decided, graft=miss)

    def leave_unrepaired(self, reason: str) -> None:
        """Note why what was left for after the first token will not be repaired; ignored where nothing is due."""
        if self.repair_phase is RepairPhase.DUE and self.repair is not None:
            self.repair, self.repair_phase = replace(self.repair, reason=reason), RepairPhase.NONE

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

    def report(self, policy: str) -> GraftReport:
        """Return what was reused for the prompt, by the worst attempt at it."""
        graft, outcome = self.decided.graft, self.outcome
        timings = {"lookup": self.decided.lookup_ms}
        if outcome is not None:
            timings |= {"graft": outcome.inject_ms, "recompute": outcome.compute_ms}
            timings |= {"read": outcome.read_ms} if outcome.read_ms else {}
        report = request_report(
            self.lineage,
            self.prompt.num_prompt_tokens,
            policy=policy,
            corrected_tokens=0 if outcome is None else outcome.corrected_tokens,
            timings_ms=timings,
            miss=graft if isinstance(graft, Miss) else None,
            substitution=graft.decision.substitution if isinstance(graft, Claim) else None,
            repair=self.repair,
        )
        if self.earlier.report is None:
            return report
        worst = worst_report((report, self.earlier.report))
        return replace(worst, repair=_since_the_first(self.earlier.report.repair, report.repair))


def _since_the_first(earlier: RepairReport | None, repair: RepairReport | None) -> RepairReport | None:
    """Join the repairs of two attempts: the first one's, with the token from which on either had repaired K/V."""
    if earlier is None or earlier.from_token is not None:
        return earlier or repair
    return earlier if repair is None else replace(earlier, from_token=repair.from_token)
