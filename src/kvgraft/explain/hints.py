"""What a report means for somebody who wants more of a prompt reused: reasons in plain words, and what would change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.explain.requests import RunKind
from kvgraft.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.explain.requests import Attempt, Run
    from kvgraft.explain.text import PromptText

_LONG = 64
"""Tokens from which on it is worth a line that a run was moved."""


def cost_in_words(attempt: Attempt) -> str:
    """What a prompt cost beside a full prefill; empty where the engine does not count operations."""
    if attempt.operations is None:
        return ""
    run, full = attempt.operations
    return f"{run / full:.0%} of the operations of a full prefill ({run / 1e9:,.1f} of {full / 1e9:,.1f} GFLOP)"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why nothing was copied.

    Attributes:
        words: What happened.
        remedy: What would change it.
    """

    words: str
    remedy: str


REASONS = {
    MissReason.REUSE_OFF: Reason("the request, or the server, asked for no grafts", "ask with reuse graft"),
    MissReason.NO_DONORS: Reason(
        "nothing had been read yet that may be reused here",
        "send another request with the same text, model and cache_salt; behind a restart, set a store",
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
    MissReason.REFRESHED: Reason(
        "earlier prompts had reused the same text here approximately, and this one was computed in full to end that",
        "nothing: what begins alike has it exactly now; idle time, on which the engine heals, makes it rarer "
        "(setting refresh_after)",
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


def hints(attempt: Attempt, text: PromptText | None = None) -> Iterator[str]:
    """Yield sentences on what keeps reused text from being exact: what stands in front of it, or was read behind a graft.

    Args:
        attempt: Of a request.
        text: Words of the prompt, where they may be quoted.
    """
    in_front = _computed_in_front(attempt)
    moved = sum(run.length for run in attempt.runs if run.kind is RunKind.SHIFTED)
    if in_front is not None and moved >= _LONG:
        quoted = "" if text is None else f" ({_quote(text.between(in_front.start, in_front.stop))})"
        yield (
            f"{in_front.length:,} new tokens{quoted} at positions {in_front.start:,}-{in_front.stop - 1:,} stand in front of "
            f"{moved:,} copied ones: behind these they would do no harm, and more could be exact"
        )
    deep = sum(run.length for run in attempt.runs if run.generation)
    if deep:
        yield f"{deep:,} tokens are copies of what stood behind a graft itself; they turn exact when the engine heals"


def _quote(words: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(words.split())
    return f"\u201c{line if len(line) <= _QUOTED else line[: _QUOTED - 1] + chr(0x2026)}\u201d"


def _computed_in_front(attempt: Attempt) -> Run | None:
    """The computed run directly in front of the first copied one."""
    for run, following in zip(attempt.runs, attempt.runs[1:], strict=False):
        if following.kind is RunKind.SHIFTED:
            return run if run.kind is RunKind.COMPUTED else None
    return None
