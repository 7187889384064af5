"""Reasons of a report in plain words, and the settings and prompts with which more would be reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.explain.requests import RunKind
from kvgraft.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.explain.requests import ReportedAttempt, ReportedRun
    from kvgraft.explain.text import PromptText

GOES_ON = "from the conversation before it"
"""Where K/V come from that stand where an earlier request left them; no donor has them."""
_LONG = 64
"""Tokens from which on it is worth a line that a run was moved."""


def cost_in_words(attempt: ReportedAttempt) -> str:
    """Return the cost of a prompt beside a full prefill; empty where the engine does not count operations."""
    if attempt.operations is None:
        return ""
    run, full = attempt.operations
    return f"{run / full:.0%} of the operations of a full prefill ({run / 1e9:,.1f} of {full / 1e9:,.1f} GFLOP)"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why nothing was copied, in words, and its remedy."""

    words: str
    remedy: str


REASONS = {
    MissReason.REUSE_OFF: Reason("the request, or the server, asked for no grafts", "ask with reuse graft"),
    MissReason.NO_DONORS: Reason(
        "nothing had been read yet that may be reused here",
        "send another request with the same text, model and cache_salt; after a restart, set a store",
    ),
    MissReason.NO_MATCH: Reason(
        "no text that was read before shares a run of tokens with the prompt",
        "send text unchanged: white space, case and numbers make other tokens",
    ),
    MissReason.COVERED_BY_PREFIX: Reason(
        "the exact prefix holds all that could be reused", "nothing: exact is the best that there is"
    ),
    MissReason.NOT_WORTH_IT: Reason(
        "copying and looking at the matches costs more than computing them",
        "longer texts in one piece; with selection none a graft costs less, and is further from a full prefill",
    ),
    MissReason.MODEL_REFUSED: Reason(
        "the K/V of this model, or of this server's settings, cannot be moved", "see what `kvgraft doctor` says"
    ),
    MissReason.NO_ROOM: Reason(
        "prompt and donors did not fit into the pool together",
        "raise kv_bytes (num_slots), or send fewer requests at a time",
    ),
    MissReason.DEADLINE: Reason("the lookup was not done in time", "raise lookup_deadline_ms, or keep fewer donors"),
    MissReason.STORE: Reason(
        "what was to be read from the store did not come, or not in time",
        "look at the store; a faster one, or more host_bytes",
    ),
    MissReason.RISK: Reason(
        "the risk that was asked for leaves no room for grafts now", "wait for audits, or allow a greater epsilon"
    ),
    MissReason.POLICY_ERROR: Reason(
        "the selection policy failed, or chose what cannot be computed", "correct the policy; the log has its error"
    ),
    MissReason.ERROR: Reason(
        "the graft failed and was computed instead", "the server's log has the error; please report it"
    ),
}


def reason_in_words(value: str) -> Reason:
    """Return what a reason means; of one that is not known, itself."""
    try:
        return REASONS[MissReason(value)]
    except ValueError:
        return Reason(
            f"{value} (a reason that this version does not know)", "read the report with the version that wrote it"
        )


_QUOTED = 60
"""Characters of new text that are quoted."""


def hints(attempt: ReportedAttempt, text: PromptText | None = None) -> Iterator[str]:
    """Yield sentences on what keeps reused text from being exact: new text before it, or copies before it or its donor.

    Args:
        attempt: Of a request.
        text: Words of the prompt, where they may be quoted.
    """
    before = _computed_before(attempt)
    moved = sum(run.length for run in attempt.runs if run.kind is RunKind.SHIFTED)
    if before is not None and moved >= _LONG:
        quoted = "" if text is None else f" ({_quote(text.between(before.start, before.stop))})"
        yield (
            f"{before.length:,} new tokens{quoted} at positions {before.start:,}-{before.stop - 1:,} stand before "
            f"{moved:,} copied ones: after these they would do no harm, and more could be exact"
        )
    continued = sum(run.length for run in attempt.runs if run.kind is RunKind.CONTINUED)
    if continued:
        yield (
            f"{continued:,} tokens go on from an answer that rested on copies: none is computed again, and they are as near "
            "to a full prefill as that answer was"
        )
    deep = sum(run.length for run in attempt.runs if run.generation and run.kind is not RunKind.CONTINUED)
    if deep:
        yield f"{deep:,} tokens are copies of what stood after a graft itself; they turn exact when the engine heals"


def _quote(words: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(words.split())
    return f"\u201c{line if len(line) <= _QUOTED else line[: _QUOTED - 1] + chr(0x2026)}\u201d"


def _computed_before(attempt: ReportedAttempt) -> ReportedRun | None:
    """Return the computed run directly before the first copied one."""
    for run, following in zip(attempt.runs, attempt.runs[1:], strict=False):
        if following.kind is RunKind.SHIFTED:
            return run if run.kind is RunKind.COMPUTED else None
    return None
