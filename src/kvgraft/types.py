"""The values that travel between packages: namespaces, matches, plans, reports. No behaviour beyond arithmetic."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NewType

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TokenArray = NDArray[np.int64]
"""1-D token ids."""

SHORTEST_RUN = 16
"""Tokens of the shortest run of equal text that can be found and reused; every engine, index and setting has it from here."""

DonorId = NewType("DonorId", int)
"""Identifies one registration of a donor; never given out twice, so a handle to a removed donor stays invalid."""

STAND_IN = DonorId(-1)
"""Names in plans and reports another text that stands in, which no catalogue knows."""

CONTINUATION = DonorId(-2)
"""Names in reports the text that a prompt goes on from, whose K/V the engine had in their places; no catalogue knows it."""


class ReuseMode(StrEnum):
    """Reuse that a request allows: none, exact prefixes, matches at any offset as well, or even text that is not its own."""

    OFF = "off"
    EXACT = "exact"
    GRAFT = "graft"
    SUBSTITUTE = "substitute"
    """As `graft`, and K/V of another text, named by the server's semantic provider, may stand in: the answer may be wrong."""
    VERIFIED = "verified"
    """Tokens are drafted as with `graft` while the prompt is computed in full; the answer is that of a full prefill."""

    @property
    def grafts(self) -> bool:
        """Whether matches at any offset may be copied, and text that is computed may become a donor."""
        return self in (ReuseMode.GRAFT, ReuseMode.SUBSTITUTE, ReuseMode.VERIFIED)


class RepairTime(StrEnum):
    """When the tokens that a selection policy chooses are computed again."""

    BEFORE = "before"
    """Before the first token, which waits for it."""
    AFTER = "after"
    """With the second token: the first one comes as soon as if nothing were computed again, and is as near."""


class Fidelity(StrEnum):
    """How a reused token relates to what a full prefill would have computed."""

    EXACT = "exact"
    """Same tokens before it, same position: the KV that a full prefill gives."""
    CONTINUED = "continued"
    """Same tokens before it, same position, and something approximate before it or in it: the KV with which the text would
    have gone on. Never repaired: nothing is lost that was not lost before."""
    SHIFTED = "shifted"
    """Same token, other position or other context: approximate."""
    SUBSTITUTED = "substituted"
    """Another token's KV; only a registered semantic provider can cause it."""


class MissReason(StrEnum):
    """Why nothing was grafted."""

    REUSE_OFF = "reuse_off"
    NO_DONORS = "no_donors"
    NO_MATCH = "no_match"
    COVERED_BY_PREFIX = "covered_by_prefix"
    NOT_WORTH_IT = "not_worth_it"
    MODEL_REFUSED = "model_refused"
    NO_ROOM = "no_room"
    DEADLINE = "deadline"
    STORE = "store"
    """K/V that were to be read from a store did not come, or not in time."""
    RISK = "risk"
    POLICY_ERROR = "policy_error"
    """The selection policy failed, or chose what cannot be computed."""
    ERROR = "error"


@dataclass(frozen=True)
class Namespace:
    """Texts that may be reused together: one model state, one adapter, one tenant."""

    model_fingerprint: str
    """Weights revision, dtype, RoPE parameters and tokenizer, digested."""
    adapter: str = ""
    """LoRA adapter, empty for none."""
    tenant_salt: str = ""
    """`cache_salt` of the request, empty for none."""

    @cached_property
    def key(self) -> bytes:
        """16 bytes that key every hash of this namespace; fields cannot run into one another."""
        digest = hashlib.blake2b(digest_size=16, person=b"kvgraft.ns")
        for text in (self.model_fingerprint, self.adapter, self.tenant_salt):
            raw = text.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class KeyedNamespace:
    """A namespace of which only the key is known: of donors that another process has stored. Its tenant stays unknown."""

    key: bytes
    """As `Namespace.key`; namespaces with the same key are the same."""


@dataclass(frozen=True, slots=True)
class Match:
    """Equal tokens in prompt and donor, verified id by id.

    `prompt[target_start : target_start + length] == donor.token_ids[donor_start : donor_start + length]`
    """

    target_start: int
    donor_id: DonorId
    donor_start: int
    """Index of the first one among the donor's."""
    length: int
    fidelity: Fidelity = Fidelity.SHIFTED
    """`exact` or `continued` where the donor stands at the prompt's positions after the prompt's own tokens, from 0 on; the
    former if it attended to nothing approximate, so that its K/V are those of a full prefill of the prompt."""
    generation: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the donor's K/V there are those of a full prefill of the prompt."""
        return self.fidelity is Fidelity.EXACT

    @property
    def is_shifted(self) -> bool:
        """Whether a policy may have some of it computed again."""
        return self.fidelity is Fidelity.SHIFTED

    @property
    def target_end(self) -> int:
        """First prompt position after the match."""
        return self.target_start + self.length

    @property
    def position_delta(self) -> int:
        """`target_start - donor_start`, in indices of the donor's `token_ids`."""
        return self.target_start - self.donor_start

    def part(self, start: int, stop: int) -> Match:
        """Return the part at prompt positions `[start, stop)`, which is not empty."""
        start, stop = max(start, self.target_start), min(stop, self.target_end)
        donor_start = self.donor_start + start - self.target_start
        return replace(self, target_start=start, donor_start=donor_start, length=stop - start)


@dataclass(frozen=True, slots=True, eq=False)
class GraftPlan:
    """The prompt positions that are reused and those that are computed."""

    num_tokens: int
    prefix_len: int
    """Positions `[0, prefix_len)` have their K/V already: those of the exact prefix, and what the prompt goes on from."""
    spans: tuple[Match, ...]
    """Sorted, disjoint matches after `prefix_len`."""
    compute: NDArray[np.int64]
    """Ascending int64 positions of everything else, and the last position always."""

    @classmethod
    def over(cls, num_tokens: int, prefix_len: int, spans: Iterable[Match] = ()) -> GraftPlan:
        """Return the plan that reuses `spans`, sorted and disjoint after `prefix_len`, and computes the rest.

        Complexity: O(n + spans).
        """
        spans = tuple(spans)
        is_computed = np.ones(num_tokens, np.bool_)
        is_computed[: min(prefix_len, num_tokens - 1)] = False
        for span in spans:
            is_computed[span.target_start : min(span.target_end, num_tokens - 1)] = False
        return cls(num_tokens, prefix_len, spans, np.flatnonzero(is_computed))

    @property
    def settled_end(self) -> int:
        """End of the K/V that no repair changes: the prefix, and spans that follow at once and are not shifted."""
        end = self.prefix_len
        for span in self.spans:
            if span.is_shifted or span.target_start != end:
                break
            end = span.target_end
        return end

    @property
    def shifted(self) -> tuple[tuple[int, int], ...]:
        """Start and length of what is copied from elsewhere, which a policy may have computed again."""
        return tuple((span.target_start, span.length) for span in self.spans if span.is_shifted)

    @property
    def has_shifted(self) -> bool:
        """Whether anything is copied from elsewhere."""
        return any(span.is_shifted for span in self.spans)

    @property
    def reused_len(self) -> int:
        """Tokens taken from donors (an always-computed last token not counted)."""
        return self.num_tokens - self.prefix_len - len(self.compute)


@dataclass(frozen=True, slots=True)
class Miss:
    """No graft, and why."""

    reason: MissReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NamedPart:
    """Tokens of a text that its sender has given a name."""

    document_id: str
    start: int
    length: int

    @property
    def stop(self) -> int:
        """First token after the last one."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class SpanReport:
    """One reused span in a report.

    `length` tokens from position `target_start` of the prompt on have the K/V of as many tokens of donor `donor_id` from its
    position `donor_start` on, moved by `position_delta` positions. `generation` is the donor's.
    """

    target_start: int
    length: int
    donor_id: DonorId
    donor_start: int
    position_delta: int
    fidelity: Fidelity
    generation: int
    tier: str = ""
    """Where the donor's K/V lay: `device`, `host` or the name of a store; empty where the engine does not say."""
    documents: tuple[NamedPart, ...] = ()
    """Parts of the donor that lie in the span and that its sender had named; `start` is a position of the prompt."""


class RiskStatus(StrEnum):
    """State of knowledge about the risk of grafted requests."""

    UNCALIBRATED = "uncalibrated"
    """Nothing is stated: no calibration file is in use, or the request chose a selection policy of its own."""
    CALIBRATED = "calibrated"
    """The notch was shown to keep the risk on the prompts of the calibration."""
    CERTIFIED = "certified"
    """Audits of served requests have shown it too."""
    BREACHED = "breached"
    """Audits showed a higher risk: the notch is a more conservative one, without a certificate yet, or nothing is grafted."""


@dataclass(frozen=True, slots=True)
class RiskStatement:
    """A statement about grafted requests of one kind: a rate over traffic like the audited one, never one answer."""

    status: RiskStatus = RiskStatus.UNCALIBRATED
    epsilon: float | None = None
    """Mean loss that is not to be exceeded; None if nothing is stated."""
    delta: float | None = None
    """Probability with which the statement may be wrong; None if nothing is stated."""
    loss: str = ""
    """What counts as a loss, such as `first_token`; empty if nothing is stated."""
    notch: str = ""
    """Name of the policy's setting, `full` where nothing is grafted; empty if nothing is stated."""
    audits: int = 0
    """Requests of this kind, at this notch, that were compared with full prefill while serving."""
    reason: str = ""
    """Why nothing is stated; empty if something is."""
    part: str = ""
    """Part of the answer about which least is known: its `first` token, drawn before the repair, its `later` ones, or the
    `whole` of an answer that waited for the repair; empty if nothing is stated."""


UNCALIBRATED = RiskStatement(reason="no calibration is in use")
"""The statement that states nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Substitution:
    """The text with K/V that stand in for a prompt's."""

    source_id: str
    """Name that the semantic provider gave the other text."""
    metadata: Mapping[str, object]
    """What it said besides, such as a similarity."""


@dataclass(frozen=True, slots=True)
class HealingReport:
    """How the K/V of a request that began with a graft became those of a full prefill, and what its drafts were worth.

    Seconds count from the request's arrival.
    """

    spans: tuple[SpanReport, ...] = ()
    """What was copied for the drafts, in prompt order; none of it is left."""
    healed_tokens: int = 0
    drafted_tokens: int = 0
    retracted_tokens: int = 0
    """Of them, those that a full prefill does not give."""
    first_provisional_s: float = 0.0
    first_verified_s: float = 0.0
    healed_at_s: float = 0.0
    """Until nothing approximate was left, of the prompt and of what was drafted after it."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """When the choice of the selection policy was computed.

    Tokens of the answer count from 1.
    """

    time: RepairTime
    reason: str = ""
    """Why it is not the time that was asked for; empty if it is."""
    from_token: int | None = None
    """First token drawn from the repaired K/V; 1 for all, None if the answer ended before the repair."""
    rows_per_step: int = 0
    """Further rows that each decode step computes exactly, in order, from then on (`repair_rows`)."""
    exact_from_token: int | None = None
    """First token drawn from K/V that are all those of a full prefill, or None."""
    healed_tokens: int = 0
    """Tokens of prompt and answer that were computed again in order after the first token, over nothing copied: by
    `repair_rows`, or because the policy failed. The counts of the prompt stay those that the first token was drawn from."""


@dataclass(frozen=True, slots=True)
class GraftReport:
    """Reuse of one request: what, from where, and at what cost. One object feeds response, metrics and traces.

    Counts are tokens of the prompt, `num_tokens` all of them; `spans` ascend by position and do not overlap. `policy` chose
    what was computed again; `miss` says why nothing was grafted, None where something was. `full_flops` are the operations of
    a prefill that reuses nothing.
    """

    num_tokens: int
    exact_tokens: int = 0
    """Prompt tokens with the K/V of a full prefill."""
    continued_tokens: int = 0
    """Prompt tokens with approximate K/V in their own places: what an earlier request was answered from, and goes on."""
    shifted_tokens: int = 0
    """Prompt tokens with approximate K/V (recomputed ones not counted)."""
    substituted_tokens: int = 0
    """Prompt tokens with the K/V of another token."""
    recomputed_tokens: int = 0
    """Reused tokens that the selection policy had computed again."""
    computed_tokens: int = 0
    """Prompt tokens computed in all, the recomputed ones included."""
    spans: tuple[SpanReport, ...] = ()
    policy: str = "none"
    corrected_tokens: int = 0
    """Shifted tokens that were corrected by the drift of recomputed ones; approximate all the same."""
    timings_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by step (`lookup`, `graft`, `prefill`, ...)."""
    miss: Miss | None = None
    computed_flops: float = 0.0
    """Floating-point operations of all rows that were run for the prompt, those that several passes ran as often, a look at
    the first layers by its share of the layers, what a drift correction takes, and of `RepairReport.healed_tokens`."""
    full_flops: float = 0.0
    risk: RiskStatement = UNCALIBRATED
    """What may be said about grafts of this kind; states nothing without a calibration."""
    substitution: Substitution | None = None
    """The other text with K/V that stand in; None where all are of equal text."""
    healing: HealingReport | None = None
    """How the answer came to be verified, or None: it did not begin with a graft, or `reuse` was not `verified`."""
    recomputed_runs: tuple[tuple[int, int], ...] = ()
    """Ascending `(start, length)` of the recomputed tokens; empty where some of them lie in gaps between the spans, because
    the policy left them out of the copies."""
    repair: RepairReport | None = None
    """When the recomputed tokens were computed; None where nothing approximate is reused, or no policy chooses."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return self.exact_tokens + self.continued_tokens + self.shifted_tokens + self.substituted_tokens

    @property
    def num_copied(self) -> int:
        """Prompt tokens with K/V of a donor when the first row was computed."""
        return sum(span.length for span in self.spans)

    @property
    def num_donors(self) -> int:
        """Distinct donors that gave a span."""
        return len({span.donor_id for span in self.spans} - {CONTINUATION})


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Counters of a store."""

    name: str
    reads: Mapping[str, int] = field(default_factory=dict)
    """Reads by outcome: `hit`, `missing`, `corrupt`, `failed`, `refused`, `cancelled`, `late`."""
    read_bytes: int = 0
    writes: Mapping[str, int] = field(default_factory=dict)
    """Donors by outcome: `stored`, `known`, `dropped`, `refused`, `failed`."""
    written_bytes: int = 0
    is_resting: bool = False
    """Whether its last read failed or came too late: it is left alone now and then, for longer each time."""
    failed_looks: int = 0
    """How often it could not be asked for what it has."""
