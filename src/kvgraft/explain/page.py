"""A request as one HTML file: no scripts, nothing fetched, nothing of a prompt unless it is handed in."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from kvgraft.explain.hints import GOES_ON, cost_in_words, hints, reason_in_words
from kvgraft.explain.palette import PALETTE
from kvgraft.explain.requests import RunKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvgraft.explain.requests import ExplainedRequest, ReportedAttempt, ReportedRun
    from kvgraft.explain.text import PromptText

_WIDTH = 1000.0
_MOST_RUNS = 240
"""Runs that are drawn one by one; of more, the longest. A page of 32K tokens stays below 500 KB."""
_COPIED = ("positions", "tokens", "class", "donor", "from", "moved by", "generation", "memory", "documents")
"""Heads of the table of reported runs; beside each value where there is no room for a table."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
svg { display: block; width: 100%; } .part { white-space: nowrap; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .15rem .5rem; text-align: left; }
td { border-top: 1px solid var(--line); overflow-wrap: anywhere; } .number { text-align: right; }
.scroll { overflow-x: auto; }
.exact { fill: var(--exact); } .continued { fill: var(--continued); } .shifted { fill: var(--shifted); }
.substituted { fill: var(--substituted); } .computed { fill: var(--computed); }
.recomputed { fill: var(--recomputed); } .link { opacity: .25; } .donor { fill: var(--pale); } .time { fill: var(--shifted); }
svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.key.exact { background: var(--exact); } .key.continued { background: var(--continued); }
.key.shifted { background: var(--shifted); }
.key.substituted { background: var(--substituted); } .key.computed { background: var(--computed); }
.key.recomputed { background: var(--recomputed); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; unicode-bidi: isolate; }
pre bdi { border-bottom: 3px solid; } pre .exact { border-color: var(--exact); }
pre .continued { border-color: var(--continued); } pre .shifted { border-color: var(--shifted); }
pre .substituted { border-color: var(--substituted); } pre .computed { border-color: var(--computed); }
pre b { font-weight: inherit; border-bottom: 3px solid var(--recomputed); }
"""
_NARROW_STYLE = (
    """@media (max-width: 40rem) { h1 { font-size: 1.1rem; } th { display: none; } tr { display: block; }
  tr + tr { border-top: 1px solid var(--line); padding: .4rem 0; } td:empty { display: none; }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .05rem 0; }
"""
    + "".join(f'  td:nth-child({number})::before {{ content: "{head}"; }}\n' for number, head in enumerate(_COPIED, 1))
    + "}\n"
)


def page(requests: Sequence[ExplainedRequest], *, text: PromptText | None = None) -> str:
    """Return the page of one request, or of several under one another to be compared.

    Args:
        requests: Which.
        text: Words of the first one's prompt, to be shown.
    """
    parts = ['<!doctype html><html lang="en"><head><meta charset="utf-8">']
    parts.append(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
    parts.append('<meta name="viewport" content="width=device-width, initial-scale=1"><title>kvgraft explain</title>')
    parts.append(f"<style>{PALETTE}{_STYLE}{_NARROW_STYLE}</style></head><body>")
    for number, request in enumerate(requests):
        parts += _request(request, text if number == 0 else None)
    return "".join([*parts, "</body></html>\n"])


def _request(request: ExplainedRequest, text: PromptText | None) -> Iterator[str]:
    yield f"<h1>Request {escape(request.request_id)}</h1>"
    answered = "" if request.output_tokens is None else f"{request.output_tokens:,} tokens generated"
    yield f"<p>{escape(', '.join(filter(None, [request.outcome, answered])))}</p>"
    for number, attempt in enumerate(request.attempts, 1):
        is_answered = number == len(request.attempts)
        if len(request.attempts) > 1:
            yield f"<h2>Attempt {number} of {len(request.attempts)}{'' if is_answered else ' (lost its slots)'}</h2>"
        yield from _attempt(attempt, text if is_answered else None)


def _attempt(attempt: ReportedAttempt, text: PromptText | None) -> Iterator[str]:
    yield (
        "<p>"
        + "".join(
            f'<span class="part"><span class="key {kind}"></span>{attempt.tokens(kind):,} {kind}</span> '
            for kind in RunKind
            if kind is not RunKind.RECOMPUTED
        )
        + f"of {attempt.num_tokens:,} prompt tokens"
    )
    recomputed = attempt.report["recomputed_tokens"]
    if recomputed:
        yield f'; <span class="key recomputed"></span>{recomputed:,} of the computed ones lie in copied runs, chosen by '
        yield escape(attempt.report["policy"])
    if cost := cost_in_words(attempt):
        yield f"; {cost}"
    yield "</p>"
    runs = _drawn(attempt.runs)
    yield _bars(attempt, runs)
    if attempt.repair:
        yield f"<p>{escape(attempt.repair)}</p>"
    yield from _reasons(attempt, text)
    yield from _donors(attempt, runs)
    yield from _times(attempt.report)
    if text is not None:
        yield "<h2>The prompt</h2><pre>"
        yield from _words(attempt, runs, text)
        yield "</pre>"


def _words(attempt: ReportedAttempt, runs: Sequence[ReportedRun], text: PromptText) -> Iterator[str]:
    """Yield the prompt's words run by run, with marks where they were computed again: thousands in long prompts."""
    drawn = {run.start for run in runs}
    pieces = attempt.pieces()
    for run in attempt.runs:
        title = f' title="{escape(_title(run, attempt.again_in(run)))}"' if run.start in drawn else ""
        yield f"<bdi class={run.kind}{title}>"
        at = run.start
        while at < run.stop:
            piece = next(pieces)
            words, at = escape(text.between(piece.start, piece.stop)), piece.stop
            yield f"<b>{words}</b>" if piece.kind is RunKind.RECOMPUTED else words
        yield "</bdi>"


def _drawn(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    longest = sorted(runs, key=lambda run: -run.length)[:_MOST_RUNS]
    return sorted(longest, key=lambda run: run.start)


def _bars(attempt: ReportedAttempt, runs: Sequence[ReportedRun]) -> str:
    """Draw the prompt as a bar, and under it each donor with what was copied of it, joined to where it went."""
    scale = _WIDTH / max(1, attempt.num_tokens)
    donors = list(dict.fromkeys(run.donor for run in runs if run.donor))[:12]
    ends = {name: max((run.donor_start or 0) + run.length for run in runs if run.donor == name) for name in donors}
    parts = []
    for number, name in enumerate(donors):
        top, width = 100 + 70 * number, _WIDTH / max(1, ends[name])
        parts.append(f'<rect class="donor" x="0" y="{top}" width="{_WIDTH:.0f}" height="16"/>')
        for run in runs:
            if run.donor != name:
                continue
            left, right = (run.donor_start or 0) * width, ((run.donor_start or 0) + run.length) * width
            corners = f"{run.start * scale:.1f},34 {run.stop * scale:.1f},34 {right:.1f},{top} {left:.1f},{top}"
            parts.append(f'<polygon class="link {run.kind}" points="{corners}"/>')
            parts.append(_rectangle(run, left, right - left, top, 16))
    parts += _others(attempt, runs, scale)
    parts += [
        _rectangle(run, run.start * scale, run.length * scale, 4, 30, again=attempt.again_in(run)) for run in runs
    ]
    names = "".join(f'<text x="0" y="{96 + 70 * number}">{escape(name)}</text>' for number, name in enumerate(donors))
    shapes = "".join([*parts, _recomputed(attempt, scale)])
    return _drawing("the prompt by class", 60 + 70 * len(donors), shapes, names)


def _drawing(label: str, height: int, shapes: str, texts: str) -> str:
    """Return shapes that are as wide as the window, `_WIDTH` across, with texts over them that keep their size."""
    stretched = f'<svg viewBox="0 0 {_WIDTH:.0f} {height}" height="{height}" preserveAspectRatio="none">{shapes}</svg>'
    return f'<svg height="{height}" role="img" aria-label="{label}">{stretched}{texts}</svg>'


def _recomputed(attempt: ReportedAttempt, scale: float) -> str:
    """Draw where the prompt's tokens were computed again, as one shape over the foot of its bar."""
    marks = "".join(
        f"M{start * scale:.1f} 22h{max(length * scale, 0.3):.1f}v12H{start * scale:.1f}z"
        for start, length in attempt.recomputed
    )
    return f'<path class="recomputed" pointer-events="none" d="{marks}"/>' if marks else ""


def _others(attempt: ReportedAttempt, runs: Sequence[ReportedRun], scale: float) -> Iterator[str]:
    """Yield the runs that are not drawn one by one, as a shape per class."""
    drawn = {run.start for run in runs}
    others = [run for run in attempt.runs if run.start not in drawn]
    for kind in dict.fromkeys(run.kind for run in others):
        places = {(round(run.start * scale), max(1, round(run.length * scale))) for run in others if run.kind is kind}
        marks = "".join(f"M{left} 4h{width}v30h-{width}z" for left, width in sorted(places))
        yield f'<path class="{kind}" d="{marks}"/>'


def _rectangle(run: ReportedRun, left: float, width: float, top: float, height: float, *, again: int = 0) -> str:
    shape = f'x="{left:.1f}" y="{top}" width="{max(width, 0.3):.1f}" height="{height}"'
    return f'<rect class="{run.kind}" {shape}><title>{escape(_title(run, again))}</title></rect>'


def _title(run: ReportedRun, again: int = 0) -> str:
    place = f"positions {run.start:,}-{run.stop - 1:,}: {run.length:,} tokens {run.kind}"
    if not run.donor:
        return f"{place}, {GOES_ON}, generation {run.generation}" if run.is_reported else place
    moved = f"moved by {run.moved_by:+,}, generation {run.generation}"
    recomputed = f", {again:,} of them computed again" if again else ""
    return f"{place}, from position {run.donor_start:,} of {run.donor}, {moved}{recomputed}"


def _reasons(attempt: ReportedAttempt, text: PromptText | None) -> Iterator[str]:
    sentences = list(hints(attempt, text))
    miss = attempt.report["miss"]
    if miss:
        reason = reason_in_words(miss["reason"])
        detail = f" ({miss['detail']})" if miss["detail"] else ""
        sentences[:0] = [f"Nothing was copied: {reason.words}{detail}.", f"What helps: {reason.remedy}."]
    if sentences:
        yield "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _donors(attempt: ReportedAttempt, runs: Sequence[ReportedRun]) -> Iterator[str]:
    reported = [run for run in runs if run.is_reported]
    if not reported:
        return
    hidden = sum(1 for run in attempt.runs if run.is_reported) - len(reported)
    yield "<h2>What was reused</h2><div class=scroll><table><tr>"
    yield "".join(f"<th>{head}</th>" for head in _COPIED) + "</tr>"
    for run in reported:
        cells = (
            f"{run.start:,}-{run.stop - 1:,}",
            f"{run.length:,}",
            str(run.kind),
            run.donor or GOES_ON.removeprefix("from "),
            f"{run.donor_start:,}" if run.donor else "",
            f"{run.moved_by:+,}" if run.donor else "",
            str(run.generation),
            run.tier,
            ", ".join(run.documents),
        )
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table></div>" + (f"<p>and {hidden:,} shorter runs</p>" if hidden else "")


def _times(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield times one after another, as bars."""
    timings = report["timings_ms"]
    total, at = sum(timings.values()), 0.0
    if not total:
        return
    shapes, texts = [], []
    for number, (name, value) in enumerate(timings.items()):
        left, width, top = _WIDTH * at / total, max(1.0, _WIDTH * value / total), 34 * number
        texts.append(f'<text x="0" y="{top + 14}">{escape(name)} {value:,.2f} ms</text>')
        shapes.append(f'<rect class="time" x="{left:.1f}" y="{top + 18}" width="{width:.1f}" height="10"/>')
        at += value
    yield "<h2>Times</h2>" + _drawing("times", 34 * len(timings), "".join(shapes), "".join(texts))
