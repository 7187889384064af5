"""Requests out of their reports, in any of the files that have reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError
from kvgraft.explain.repairs import repair_in_words
from kvgraft.reuse.report import REPORT_VERSION
from kvgraft.types import CONTINUATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class RunKind(StrEnum):
    """Ways in which an engine came by K/V of prompt tokens."""

    EXACT = "exact"
    CONTINUED = "continued"
    """In their own places after the same text, some of which was approximate."""
    SHIFTED = "shifted"
    SUBSTITUTED = "substituted"
    RECOMPUTED = "recomputed"
    """Copied, and chosen by the policy to be computed again."""
    COMPUTED = "computed"


COUNTS = ("num_tokens", *(f"{kind}_tokens" for kind in RunKind), "corrected_tokens", "num_donors")
"""Fields of a report that count something."""
_OPERATIONS = ("computed_flops", "full_flops")


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """Adjacent tokens of a prompt with one fate.

    Attributes:
        start: First position.
        length: How many there are.
        kind: Their fate.
        donor: Their donor, in words; empty without one, as what a prompt goes on from is.
        donor_start: Where the donor had the first of them; None where it is not known.
        generation: How often the K/V were copied before.
        tier: Memory that the K/V came from, or empty.
        documents: Names of documents that lie in it.
    """

    start: int
    length: int
    kind: RunKind
    donor: str = ""
    donor_start: int | None = None
    generation: int = 0
    tier: str = ""
    documents: tuple[str, ...] = ()

    @property
    def stop(self) -> int:
        """First position after it."""
        return self.start + self.length

    @property
    def is_reported(self) -> bool:
        """Whether a report has it among its spans; what the exact prefix gave and what was computed is not."""
        return bool(self.donor) or self.kind is RunKind.CONTINUED

    @property
    def moved_by(self) -> int:
        """Positions by which it moved from its place in the donor; 0 where that is not known."""
        return 0 if self.donor_start is None else self.start - self.donor_start

    def part(self, start: int, stop: int) -> ReportedRun:
        """Return its part at `[start, stop)`."""
        donor_start = None if self.donor_start is None else self.donor_start + start - self.start
        return replace(self, start=start, length=stop - start, donor_start=donor_start)


@dataclass(frozen=True, slots=True)
class ReportedAttempt:
    """A try to answer a request; engines that take its slots away begin again.

    Attributes:
        raw: As `report_as_dict` gives it, and what an engine's file has beside.
        report: The same with every field that is read here, of its type (`_whole`).
        runs: All of the prompt, in order; neighbours of a kind are of different donors. None is recomputed: such tokens lie
            in copied runs.
        recomputed: Ascending `(start, length)` of those; empty where the engine did not say which they are.
        repair: From which token of the answer on these had been computed, in words; empty where the report does not say.
    """

    raw: Mapping[str, Any]
    report: Mapping[str, Any]
    runs: tuple[ReportedRun, ...]
    recomputed: tuple[tuple[int, int], ...] = ()
    repair: str = ""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.report["num_tokens"])

    def pieces(self) -> Iterator[ReportedRun]:
        """Yield all of the prompt like `runs`, these cut where tokens were computed again."""
        again = iter(self.recomputed)
        start, length = next(again, (self.num_tokens, 0))
        for run in self.runs:
            at = run.start
            while start < run.stop:
                if at < start:
                    yield run.part(at, start)
                at = start + length
                yield replace(run.part(start, at), kind=RunKind.RECOMPUTED)
                start, length = next(again, (self.num_tokens, 0))
            if at < run.stop:
                yield run.part(at, run.stop)

    def again_in(self, run: ReportedRun) -> int:
        """Count tokens of a run that were computed again."""
        return sum(length for start, length in self.recomputed if run.start <= start < run.stop)

    @property
    def operations(self) -> tuple[float, float] | None:
        """Floating-point operations of the prompt and of its full prefill; None where they were not counted."""
        run, full = (self.report[name] for name in _OPERATIONS)
        return (run, full) if full > 0 else None

    def tokens(self, kind: RunKind) -> int:
        """Return the engine's count of tokens of a kind: recomputed tokens of a span are computed ones, too."""
        return int(self.report[f"{kind}_tokens"])


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A request with its attempts.

    Attributes:
        request_id: The engine's, or the server's.
        outcome: How it ended; empty where the report does not say.
        output_tokens: Tokens of the answer; None where the report does not say.
        attempts: At least one; the last one was answered.
        prompt_token_ids: The prompt, where the report has it.
    """

    request_id: str
    outcome: str
    output_tokens: int | None
    attempts: tuple[ReportedAttempt, ...]
    prompt_token_ids: tuple[int, ...] | None = None

    @classmethod
    def of_report(
        cls, report: Mapping[str, Any], request_id: str, outcome: str, output_tokens: int | None
    ) -> ExplainedRequest:
        """Explain a request from its report, as `report_as_dict` gives it.

        Raises:
            ConfigError: The report is of a later version.
        """
        return cls(request_id, outcome, output_tokens, (_attempt(report),))

    @property
    def last(self) -> ReportedAttempt:
        """The attempt that was answered."""
        return self.attempts[-1]


def read_requests(text: str, source: str) -> list[ExplainedRequest]:
    """Read requests out of a file's text: lines of an engine's report file, answers of a server, or single reports.

    Answers are those of completions, chats and responses with their `kvgraft` object (`kv_transfer_params` in vLLM,
    `meta_info` of SGLang's `/generate`), as JSON, a line each, or as the lines of a stream; what `kvgraft generate --json`
    prints is read as well. What is no report is passed over where others are, and so is a line that was cut short.

    Args:
        text: Of the file.
        source: Its name, for messages.

    Raises:
        ConfigError: There is no report in it, one is not whole, or it is of a later version.
    """
    if not text.strip():
        raise ConfigError(f"{source} is empty; give a report file, or an answer with its kvgraft object")
    try:
        entries = list(_entries(text))
    except RecursionError as error:
        raise ConfigError(f"{source} cannot be read as reports: it is nested too deep") from error
    if not entries:
        raise ConfigError(
            f"{source} has no JSON object, whole or in a line; give a report file, or a server's answers as they came"
        )
    found = [
        _request(entry, f"{source}, entry {number}")
        for number, entry in enumerate(entries, 1)
        if _report_of(entry) is not None or "attempts" in entry
    ]
    if not found:
        raise ConfigError(
            f"{source} has no report of kvgraft; give a report file, or an answer with its kvgraft object"
        )
    return found


def _entries(text: str) -> Iterator[dict[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        for line in text.split("\n"):  # JSON may have other ends of lines in its texts
            try:
                entry = json.loads(line.removeprefix("data:"))
            except ValueError:
                continue  # a line that is being written, or another part of a stream
            if isinstance(entry, dict):
                yield entry
    else:
        yield from (entry for entry in (whole if isinstance(whole, list) else [whole]) if isinstance(entry, dict))


def _report_of(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the report in an answer, a choice of it, a chunk, a response, or an entry that is one."""
    choices = entry.get("choices")
    places: list[object] = [entry, *(entry.get(name) for name in ("kv_transfer_params", "meta_info", "response"))]
    if isinstance(choices, list):
        places += choices
    for place in places:
        for name in ("kvgraft", "report"):
            if isinstance(place, dict) and isinstance(found := place.get(name), dict) and "num_tokens" in found:
                return found
    return entry if "num_tokens" in entry and "spans" in entry else None


def _request(entry: Mapping[str, Any], where: str) -> ExplainedRequest:
    usage, tokens = entry.get("usage"), entry.get("prompt_token_ids")
    if "attempts" in entry:
        reports, name, answered = entry["attempts"], entry.get("request_id", ""), entry.get("output_tokens")
    else:
        reports, name = [_report_of(entry)], entry.get("id", entry.get("request_id", ""))
        answered = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(generated := entry.get("token_ids"), list):
            answered = len(generated)
    choices = entry.get("choices")
    if tokens is None and isinstance(choices, list) and choices and isinstance(choices[0], dict):
        tokens = choices[0].get("prompt_token_ids")
    try:
        attempts = (_attempt(reports[0]), *(_attempt(report) for report in reports[1:]))
    except ConfigError as error:
        raise ConfigError(f"{where} is {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{where} is no whole report ({type(error).__name__}: {error})") from error
    return ExplainedRequest(
        str(name),
        str(entry.get("outcome", "")),
        answered if isinstance(answered, int) else None,
        attempts,
        tuple(tokens) if isinstance(tokens, list) else None,
    )


def _attempt(report: Mapping[str, Any]) -> ReportedAttempt:
    version = report.get("version", REPORT_VERSION)
    if version > REPORT_VERSION:
        raise ConfigError(
            f"a report of version {version} was written by a later kvgraft, and this one reads {REPORT_VERSION}; upgrade"
        )
    whole = _whole(report)
    sources = report.get("sources") or [None] * len(report["spans"])
    spans = [_run(span, source) for span, source in zip(report["spans"], sources, strict=True)]
    runs = tuple(_runs(whole["num_tokens"], whole["exact_tokens"], spans))
    recomputed = tuple(_recomputed(report.get("recomputed_runs", ()), spans))
    return ReportedAttempt(report, whole, runs, recomputed, repair_in_words(whole))


def _whole(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with its counts, policy, miss and times, all of their types; older reports have fewer of them."""
    miss, timings = report.get("miss"), report.get("timings_ms") or {}
    return {
        **report,
        **{name: int(report.get(name, 0)) for name in COUNTS},
        **{name: float(report.get(name) or 0.0) for name in _OPERATIONS},
        "policy": str(report.get("policy") or "none"),
        "miss": {name: str(miss[name]) for name in ("reason", "detail")} if miss else None,
        "timings_ms": {str(step): float(value) for step, value in timings.items() if value is not None},
    }


def _recomputed(reported: Iterable[Sequence[int]], spans: Sequence[ReportedRun]) -> Iterator[tuple[int, int]]:
    """Yield what was computed again, cut where one span ends and the next one begins.

    Raises:
        ValueError: It is not ascending, or lies outside the spans.
    """
    following = iter(spans)
    span = next(following, None)
    at = 0
    for start, length in reported:
        stop = start + length
        if start < at or length < 1:
            raise ValueError(f"recomputed tokens at {start} overlap others")
        at = start
        while at < stop:
            while span is not None and span.stop <= at:
                span = next(following, None)
            if span is None or at < span.start:
                raise ValueError(f"recomputed tokens at {at} lie in no span")
            yield at, min(stop, span.stop) - at
            at = min(stop, span.stop)


def _run(span: Mapping[str, Any], source: Mapping[str, Any] | None) -> ReportedRun:
    """Return a span; report files name the donor's request and position, answers the donor's number.

    What a prompt goes on from has no donor, but a request that computed it.
    """
    donor_start: int | None
    if source is not None:
        donor, donor_start, tier = f"request {source['request']}", int(source["position"]), str(source["tier"])
    elif span.get("donor_id") == CONTINUATION:
        donor, donor_start, tier = "", None, str(span.get("tier") or "")
    else:
        donor, tier = f"donor {span['donor_id']}", str(span.get("tier") or "")
        donor_start = int(span["target_start"]) - int(span["position_delta"])
    return ReportedRun(
        int(span["target_start"]),
        int(span["length"]),
        RunKind(span["fidelity"]),
        donor,
        donor_start,
        int(span["generation"]),
        tier,
        tuple(str(part["id"]) for part in span.get("documents", ())),
    )


def _runs(num_tokens: int, exact: int, spans: Sequence[ReportedRun]) -> Iterable[ReportedRun]:
    """Yield all of a prompt: what the prefix cache gave, spans, and what was computed between them.

    Of the `exact` tokens the prefix cache gave those that are in no exact span.
    """
    at = max(0, exact - sum(span.length for span in spans if span.kind is RunKind.EXACT))
    if at:
        yield ReportedRun(0, at, RunKind.EXACT)
    for span in spans:
        if span.start < at or span.length < 1 or span.stop > num_tokens:
            raise ValueError(f"a span of {span.length} tokens at {span.start} overlaps another, or the prompt's end")
        if span.start > at:
            yield ReportedRun(at, span.start - at, RunKind.COMPUTED)
        yield span
        at = span.stop
    if at < num_tokens:
        yield ReportedRun(at, num_tokens - at, RunKind.COMPUTED)
