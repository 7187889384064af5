"""A request as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from kvgraft.explain.hints import GOES_ON, cost_in_words, hints, reason_in_words
from kvgraft.explain.requests import COUNTS, RunKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvgraft.explain.requests import ExplainedRequest, ReportedAttempt, ReportedRun
    from kvgraft.explain.text import PromptText

WIDTH = 80
_NAME = 18
"""Letters of a request's name in a table, so that there is room for the longest reason."""
_MARKS = {
    RunKind.EXACT: "#",
    RunKind.CONTINUED: "+",
    RunKind.SHIFTED: "=",
    RunKind.SUBSTITUTED: "~",
    RunKind.RECOMPUTED: "o",
    RunKind.COMPUTED: ".",
}
_COLOURS = {
    RunKind.EXACT: "32",
    RunKind.CONTINUED: "36",
    RunKind.SHIFTED: "34",
    RunKind.SUBSTITUTED: "35",
    RunKind.RECOMPUTED: "31",
    RunKind.COMPUTED: "33",
}
_WORDS = {
    RunKind.EXACT: "reused exactly",
    RunKind.CONTINUED: "continued from an earlier request",
    RunKind.SHIFTED: "copied from another position",
    RunKind.SUBSTITUTED: "copied from other tokens",
    RunKind.COMPUTED: "computed",
}
_PARTS = {
    "first": " of first tokens, which are drawn before the repair",
    "later": " of tokens after the repair",
    "whole": " of answers that waited for the repair",
}
"""What audits looked at, by the part of an answer about which least is known."""
_INDENT = "  "


def request_lines(request: ExplainedRequest, *, colour: bool = False, text: PromptText | None = None) -> Iterator[str]:
    """Yield a request for people.

    Args:
        request: Which.
        colour: Whether the terminal understands ANSI colours; without them marks distinguish classes.
        text: Words of the prompt, to be shown run by run.
    """
    ended = f": {request.outcome}" if request.outcome else ""
    answered = "" if request.output_tokens is None else f", {request.output_tokens:,} tokens generated"
    yield f"request {printable(request.request_id)}{ended}{answered}"
    for number, attempt in enumerate(request.attempts, 1):
        if len(request.attempts) > 1:
            is_lost = number < len(request.attempts)
            yield f"attempt {number} of {len(request.attempts)}" + (" (lost its slots)" if is_lost else "")
        yield from _attempt_lines(attempt, colour=colour, text=text)


def overview_lines(requests: Sequence[ExplainedRequest]) -> Iterator[str]:
    """Yield a table of requests, a line each, and what the reasons in it mean."""
    yield f"{'request':<{_NAME}} {'tokens':>7} {'exact':>7} {'continued':>9} {'copied':>7} {'computed':>8}  nothing copied"
    reasons = []
    for request in requests:
        attempt = request.last
        copied = attempt.tokens(RunKind.SHIFTED) + attempt.tokens(RunKind.SUBSTITUTED)
        miss = attempt.report["miss"]
        reason = miss["reason"] if miss else ""
        continued = attempt.tokens(RunKind.CONTINUED)
        figures = (
            f"{attempt.num_tokens:7} {attempt.tokens(RunKind.EXACT):7} {continued:9} {copied:7}"
            f" {attempt.tokens(RunKind.COMPUTED):8}"
        )
        yield f"{printable(request.request_id)[:_NAME]:<{_NAME}} {figures}  {printable(reason)}".rstrip()
        reasons.append(reason)
    for reason in dict.fromkeys(filter(None, reasons)):
        yield from _wrapped(f"{printable(reason)}: {reason_in_words(reason).words}", indent="")


def difference_lines(first: ExplainedRequest, second: ExplainedRequest, *, colour: bool = False) -> Iterator[str]:
    """Yield two requests beside one another, and which figures differ."""
    for request in (first, second):
        yield f"request {printable(request.request_id)}, {request.last.num_tokens:,} prompt tokens"
        yield _INDENT + bar(request.last, WIDTH - len(_INDENT), colour=colour)
    yield _INDENT + legend(colour=colour)
    for name in COUNTS:
        before, after = (request.last.report[name] for request in (first, second))
        change = f"{after - before:+,}" if after != before else "the same"
        yield f"{_INDENT}{name.removeprefix('num_').replace('_', ' '):<20} {before:>10,} {after:>10,}  {change}"
    for name in sorted({*first.last.report["timings_ms"], *second.last.report["timings_ms"]}):
        values = [request.last.report["timings_ms"].get(name) for request in (first, second)]
        yield f"{_INDENT}{name + ' ms':<20} " + " ".join(
            f"{'-' if value is None else format(value, ',.2f'):>10}" for value in values
        )
    for request in (first, second):
        for sentence in (*_miss_sentences(request.last), *hints(request.last)):
            yield from _wrapped(f"{printable(request.request_id)[:24]}: {sentence}", indent=_INDENT)


def bar(attempt: ReportedAttempt, width: int, *, colour: bool = False) -> str:
    """Draw a prompt as `width` marks, each of the kind of most of its tokens."""
    marks, pieces = [], tuple(attempt.pieces())
    for column in range(width):
        start, stop = attempt.num_tokens * column / width, attempt.num_tokens * (column + 1) / width
        shares = dict.fromkeys(RunKind, 0.0)
        for run in pieces:
            shares[run.kind] += max(0.0, min(run.stop, stop) - max(run.start, start))
        marks.append(max(shares, key=shares.__getitem__))
    return "".join(_painted(_MARKS[kind], kind, colour=colour) for kind in marks)


def legend(*, colour: bool = False) -> str:
    """Return the meaning of the marks."""
    return "   ".join(f"{_painted(mark, kind, colour=colour)} {kind}" for kind, mark in _MARKS.items())


def printable(text: object) -> str:
    """Strip a text from outside of all that a terminal would act upon, or turn around."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in str(text))


def _attempt_lines(attempt: ReportedAttempt, *, colour: bool, text: PromptText | None) -> Iterator[str]:
    report = attempt.report
    yield from _count_lines(attempt)
    yield _INDENT + bar(attempt, WIDTH - len(_INDENT), colour=colour)
    yield _INDENT + legend(colour=colour)
    if report.get("substitution"):
        given = report["substitution"]
        words = "".join(f", {printable(name)} {printable(value)}" for name, value in given["metadata"].items())
        yield f"  another text stands in: {printable(given['source_id']) or 'without a name'}{words}"
    for run in attempt.runs:
        yield from _run_lines(run, text, again=attempt.again_in(run), colour=colour)
    for number, sentence in enumerate(_miss_sentences(attempt), 1):
        yield from _wrapped(sentence, indent=_INDENT * number)
    if attempt.repair:
        yield from _wrapped(printable(attempt.repair), indent=_INDENT)
    has_copies = bool(attempt.tokens(RunKind.SHIFTED) or attempt.tokens(RunKind.SUBSTITUTED))
    if (has_copies or attempt.tokens(RunKind.CONTINUED)) and "risk" in report:
        which = "copied" if has_copies else RunKind.CONTINUED
        yield from _wrapped(f"risk of the {which} tokens: {_risk(report['risk'])}", indent=_INDENT)
    for hint in hints(attempt, text):
        yield from _wrapped(printable(hint), indent=_INDENT)
    yield from _timing_lines(report)


def _count_lines(attempt: ReportedAttempt) -> Iterator[str]:
    report = attempt.report
    for kind, words in _WORDS.items():
        if attempt.tokens(kind) or kind is RunKind.COMPUTED:
            yield f"  {attempt.tokens(kind):7d} of {attempt.num_tokens} prompt tokens {words}"
    if report["recomputed_tokens"]:
        yield f"  {report['recomputed_tokens']:7d} of the computed ones by policy {printable(report['policy'])}"
    if report["corrected_tokens"]:
        yield f"  {report['corrected_tokens']:7d} of the copied ones corrected by their drift"
    if cost := cost_in_words(attempt):
        yield _INDENT + cost


def _run_lines(run: ReportedRun, text: PromptText | None, *, again: int, colour: bool) -> Iterator[str]:
    if run.is_reported:
        names = f", documents {', '.join(map(printable, run.documents))}" if run.documents else ""
        memory = f"{run.tier} memory, " if run.tier else ""
        moved = f"moved by {run.moved_by:+,}, " if run.moved_by else ""
        recomputed = f", {again:,} recomputed" if again else ""
        origin = f"from position {run.donor_start} of {printable(run.donor)}" if run.donor else GOES_ON
        line = (
            f"positions {run.start}-{run.stop - 1} {origin}"
            f" ({memory}{moved}{run.kind}, generation {run.generation}{names}{recomputed})"
        )
        yield from _wrapped(line, indent=_INDENT)
    if text is not None:
        if not run.is_reported:
            yield f"{_INDENT}positions {run.start}-{run.stop - 1} {run.kind}"
        for line in text.between(run.start, run.stop).splitlines() or [""]:
            for part in textwrap.wrap(printable(line.expandtabs(4)), WIDTH - 6, drop_whitespace=False) or [""]:
                yield f"    {_painted(_MARKS[run.kind], run.kind, colour=colour)} {part}".rstrip()


def _miss_sentences(attempt: ReportedAttempt) -> Iterator[str]:
    miss = attempt.report["miss"]
    if not miss:
        return
    reason = reason_in_words(miss["reason"])
    detail = f"; {printable(miss['detail'])}" if miss["detail"] else ""
    yield f"nothing copied: {printable(miss['reason'])}{detail}"
    yield f"{reason.words}. What helps: {reason.remedy}"


def _timing_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield times as bars, one after another."""
    timings = report["timings_ms"]
    if "prefill_steps" in report:
        yield f"  {report['prefill_steps']} prefill steps"
    total, at = sum(timings.values()), 0.0
    room = WIDTH - 36
    for name, value in timings.items():
        before = round(room * at / total) if total else 0
        length = max(1, round(room * value / total)) if total else 0
        yield f"  {printable(name):<16} {value:>12,.2f} ms {' ' * before}{'-' * min(length, room - before + 1)}".rstrip()
        at += value


def _risk(risk: Mapping[str, Any]) -> str:
    if "reason" in risk:
        return f"{risk['status']}; {risk['reason']}"
    stated = f"{risk['loss']} at most {risk['epsilon']:.3g} with a probability of being wrong of {risk['delta']:.3g}"
    part = _PARTS.get(str(risk.get("part")), "")
    return f"{risk['status']}; {stated}, notch {risk['notch']!r}, {risk['audits']} audits{part}"


def _wrapped(line: str, *, indent: str) -> Iterable[str]:
    return textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _painted(mark: str, kind: RunKind, *, colour: bool) -> str:
    return f"\x1b[{_COLOURS[kind]}m{mark}\x1b[0m" if colour else mark
