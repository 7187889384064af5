"""A request, and its results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.engine.requests.repair import RepairRules
from kvgraft.types import RepairTime, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.engine.sampling.sampling import TokenLogprobs
    from kvgraft.engine.sampling.sampling_params import SamplingParams
    from kvgraft.engine.sampling.structure import Structure
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import GraftReport, NamedPart, Namespace, TokenArray


class FinishReason(StrEnum):
    """Reason of a request's end."""

    STOP = "stop"
    """End-of-text token, one of `stop_token_ids` or stop text."""
    LENGTH = "length"
    """`max_new_tokens` or the model's longest sequence."""
    ABORT = "abort"
    """Cancelled by its owner."""


class SessionName(NamedTuple):
    """Identity of a session; other clients cannot name it.

    Attributes:
        session_id: Name that its client gave it, or got.
        owner: Client, by what it presented.
        namespace: Key of the namespace of its requests.
    """

    session_id: str
    owner: str
    namespace: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class SessionTurn:
    """A request's place in a session.

    Attributes:
        name: Of the session.
        append_ids: int64 tokens to put after what the session holds; None if the request's own prompt is all of it.
    """

    name: SessionName
    append_ids: TokenArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A checked request.

    Attributes:
        request_id: Name in reports and logs; unique among unfinished requests.
        token_ids: int64 prompt.
        sampling: How to generate.
        reuse: What may be reused for it.
        namespace: K/V that it may read, and that its own will belong to.
        policy: Chooses reused tokens to compute again.
        arrival: `time.perf_counter()` when it arrived.
        correction: What is done about the drift of the others; None for nothing.
        repair: When the policy's choice is computed. An answer of one token, or one that is verified, waits for it.
        session: The session that it is a turn of, or None.
        priority: Under the eviction policy `priority`, stored prefixes of higher ones stay longer.
        provisional: With `reuse="verified"`: stream drafted tokens, too, before they are verified.
        structure: What `sampling.structure` says, compiled; None if it says nothing.
        documents: Parts of the prompt that have names.
    """

    request_id: str
    token_ids: TokenArray
    sampling: SamplingParams
    reuse: ReuseMode
    namespace: Namespace
    policy: SelectionPolicy
    arrival: float = field(default_factory=time.perf_counter)
    correction: DriftCorrection | None = None
    repair: RepairRules = field(default_factory=RepairRules)
    session: SessionTurn | None = None
    priority: int = 0
    provisional: bool = False
    structure: Structure | None = None
    documents: tuple[NamedPart, ...] = ()

    @property
    def is_constrained(self) -> bool:
        """Whether the first token decides what the answer can be; JSON begins alike in any case."""
        asked = self.sampling.structure
        return asked is not None and asked.kind in ("choice", "grammar", "regex")

    @property
    def repairs_after(self) -> bool:
        """Whether its first token may be drawn before the policy's choice is computed."""
        return (
            self.repair.time is RepairTime.AFTER
            and self.sampling.max_new_tokens > 1
            and self.reuse in (ReuseMode.GRAFT, ReuseMode.SUBSTITUTE)
        )


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput:
    """The result of a request.

    Attributes:
        request_id: Name given at submission.
        prompt_token_ids: int64 (num_tokens,); of a turn of a session all that the session holds.
        token_ids: Generated ids, the token that ended them included.
        text: Decoded output, without special tokens and what ended it unless the request wants these; empty if the model has
            no tokenizer.
        finish_reason: Why it ended.
        report: What was reused and at what cost.
        ttft_s: Seconds from arrival to the first token.
        total_s: Seconds from arrival to the end.
        queue_s: Seconds from arrival to its first admission; part of `ttft_s`.
        num_preemptions: How often it lost its slots and was computed again.
        prompt_logprobs: Of each token of the prompt, None in the place of the first; None unless the request asks.
    """

    request_id: str
    prompt_token_ids: TokenArray
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    report: GraftReport
    ttft_s: float
    total_s: float
    queue_s: float = 0.0
    num_preemptions: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptFacts:
    """Facts of a prompt as soon as it is computed.

    Attributes:
        token_ids: int64 prompt; of a turn of a session all that the session holds.
        logprobs: Of each token, None in the place of the first; None unless the request asks.
    """

    token_ids: TokenArray
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One token of a streamed request.

    A request that asks for provisional tokens gets those first. A part that is not provisional is a token of the answer: it
    confirms the oldest provisional token that is outstanding if it is equal, otherwise it retracts all of them.

    Attributes:
        text: Text that became certain; of a provisional token what it would add to the provisional text so far.
        token_id: Token drawn in this step.
        output: The whole result; set in the last part only.
        logprobs: Log-probabilities at this token, if the request asked for them.
        is_provisional: Whether the token was drawn from approximate K/V and may be retracted.
        num_retracted: Outstanding provisional tokens, the newest, that are taken back before this part counts.
        prompt: What is known of the prompt; set in the first part only.
        is_end: Whether the token ends the answer and is no part of its text.
    """

    text: str
    token_id: int
    output: RequestOutput | None = None
    logprobs: TokenLogprobs | None = None
    is_provisional: bool = False
    num_retracted: int = 0
    prompt: PromptFacts | None = None
    is_end: bool = False
