"""From which token of an answer on the policy's choice had been computed, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def repair_in_words(report: Mapping[str, Any]) -> str:
    """Return sentences on a report's `repair`; none where nothing was repaired, or an older kvgraft wrote the report."""
    repair = report.get("repair")
    sentences = _sentences(report, repair) if repair else ()
    return " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences)


def _sentences(report: Mapping[str, Any], repair: Mapping[str, Any]) -> Iterator[str]:
    again = report["recomputed_tokens"]
    reused, corrected = again + report["shifted_tokens"], report["corrected_tokens"]
    start, exact = (int(repair.get(name) or 0) for name in ("from_token", "exact_from_token"))
    if repair.get("time") == RepairTime.BEFORE:
        yield _before(str(repair.get("reason") or ""), reused, again, corrected)
    elif not start:
        yield _none(reused, int(repair.get("rows_per_step") or 0))
    else:
        yield f"{_drawn_before(start)} before the repair: nothing of the {reused:,} reused tokens had been computed again"
        if exact != start:
            yield f"from token {start:,} on, {again:,} were{_and_corrected(corrected)}"
    if exact:
        yield f"from token {exact:,} on, nothing approximate was left: all K/V were those of a full prefill"
    if healed := int(repair.get("healed_tokens") or 0):
        yield f"{healed:,} tokens of prompt and answer were computed again in order after token 1"


def _before(reason: str, reused: int, again: int, corrected: int) -> str:
    came = f"{reason}, so the repair came first" if reason else "the repair came first"
    return f"{came}: {again:,} of the {reused:,} reused tokens were computed again before token 1{_and_corrected(corrected)}"


def _none(reused: int, rows_per_step: int) -> str:
    """Describe an answer of which no token was drawn from repaired K/V."""
    if not rows_per_step:
        return f"the answer ended before the repair: nothing of the {reused:,} reused tokens was computed again"
    return (
        f"nothing of the {reused:,} reused tokens had been computed again when token 1 was drawn; steps after it computed up "
        f"to {rows_per_step:,} of them each, and the answer ended before all were"
    )


def _drawn_before(start: int) -> str:
    return "token 1 was drawn" if start <= 2 else f"tokens 1 to {start - 1:,} were drawn"


def _and_corrected(corrected: int) -> str:
    return f", and {corrected:,} were corrected" if corrected else ""
