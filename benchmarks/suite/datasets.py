"""Table T3: text that each data set shares, what is found of it, and its effect on first token and answer.

Shares are counted over the whole pack by planning alone. Times, KL and scores are of a seeded sample of the prompts that fit,
under the engine's own policy. A hit is a request into which a span was grafted, as its report says, quick or slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.bound import PrefixSet
from kvgraft.bench.fidelity.measure import Instrument
from kvgraft.bench.fidelity.rows import reused_tokens
from kvgraft.bench.fidelity.settings import default_setting
from kvgraft.bench.fidelity.split import TEST
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.bench.packs import PackSession, Workload
from kvgraft.bench.reuse import measure_reuse

from .measured import MeasuredTable
from .settings import clock_option, minutes_option, option
from .sources import ChosenDatasets, Dataset, load_dataset
from .statistics import fidelity_figures, mean, off_and_on, ratio_of_sums, task_scores, with_interval
from .timing import first_token_times, milliseconds
from .walk import Walk, consecutive, drawn, pending_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.fidelity.suites import Suite
    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM

    Record = Mapping[str, Any]
    Row = dict[str, Any]

CHUNK_TOKENS = 256
"""Of caches that hash aligned chunks; LMCache's default."""


@dataclass(frozen=True)
class DatasetsSettings(ChosenDatasets):
    """Data sets, and the sample of each that is measured."""

    limit: int = option(12, "requests per data set that are measured", least=1)
    rounds: int = option(3, "how often each request is timed, off and on in turns", least=1)
    clock: str = clock_option()
    min_run: int = option(32, "shortest run that planning counts", least=16)
    max_prompt_tokens: int = option(4608, "longer prompts are not measured", least=1)
    minutes: float = minutes_option()

    @property
    def num_steps(self) -> int:
        """Data sets, and their measured requests."""
        return len(self.present) * (1 + self.limit)


def measure(llm: LLM, settings: DatasetsSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per data set that is there; `advance` is called once per data set and measured request."""
    subject = Subject(llm, settings.max_prompt_tokens)
    own = default_setting(llm)
    instrument = Instrument(llm, subject, [own])
    shares, walks = [], []
    for dataset in settings.present:
        suite = load_dataset(dataset, settings.data)
        shares.append(_shares(suite, llm, settings, journal))
        walks.append(_walk(dataset, suite, subject, settings))
        advance()
    for suite, step, _ in pending_steps(walks, llm, instrument, journal, advance, minutes=settings.minutes):
        asked = instrument.ask(step.request, suite.metric)
        record = instrument.measure(step, asked)
        times, _ = first_token_times(llm, asked.prompt, settings.rounds)
        journal.add({"suite": suite.name, **record, "on": record["settings"][own.label], "times": times})
    return [
        {"dataset": dataset.name, "kind": "negative control" if dataset.is_control else "workload"}
        | found
        | _measured(list(journal.under(walk.suite.name)), settings)
        | {"too_long": walk.too_long}
        for dataset, found, walk in zip(settings.present, shares, walks, strict=True)
    ]


def _walk(dataset: Dataset, suite: Suite, subject: Subject, settings: DatasetsSettings) -> Walk:
    if dataset.has_documents:
        return drawn(suite, subject, side=TEST, limit=settings.limit, seed=settings.seed)
    return consecutive(suite, subject, limit=settings.limit, seed=settings.seed)


def _shares(suite: Suite, llm: LLM, settings: DatasetsSettings, journal: Journal) -> Row:
    """Columns of planning over all prompts of a data set in order of arrival."""
    name = f"{suite.name}, planned"
    found = journal.get(name, 0)
    if found is None:
        found = {"suite": name, "index": 0, "row": planned(suite, _tokenizer(llm), settings.min_run)}
        journal.add(found)
    row: Row = found["row"]
    return row


def planned(suite: Suite, tokenize: Callable[[str], NDArray[np.int32]], min_run: int) -> Row:
    """Count tokens of a suite's prompts that an exact prefix, aligned chunks, kvgraft and the bound find."""
    prompts = tuple(request.prompt for request in suite.requests)
    kept = lru_cache(maxsize=None)(tokenize)
    found = measure_reuse(Workload(suite.name, (PackSession((), prompts),)), kept, min_run=min_run)
    tokens = max(found.tokens, 1)
    prefixes, chunks = aligned_tokens([kept(prompt) for prompt in prompts])
    return {
        "requests": found.requests,
        "tokens": found.tokens,
        "prefix_share": found.prefix_tokens / tokens,
        "aligned_prefix_share": prefixes / tokens,
        "aligned_chunks_share": chunks / tokens,
        "reused_share": found.reused_tokens / tokens,
        "bound_share": found.bound_tokens / tokens,
        "half_share": found.half_reused / max(found.requests, 1),
        "wrong_tokens": found.wrong_tokens,
        "lookup_ms": found.lookup_ms["p50"],
        "lookup_p99_ms": found.lookup_ms["p99"],
    }


def aligned_tokens(prompts: Iterable[NDArray[np.int32]]) -> tuple[int, int]:
    """Tokens that aligned chunks find: whole chunks of a known prefix, and known chunks at any such offset."""
    known, prefixes = set[bytes](), PrefixSet()
    in_prefixes = in_chunks = 0
    for tokens in prompts:
        in_prefixes += prefixes.longest_prefix(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
        prefixes.add(tokens)
        ends = range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS)
        chunks = [tokens[end - CHUNK_TOKENS : end].tobytes() for end in ends]
        in_chunks += CHUNK_TOKENS * sum(chunk in known for chunk in chunks)
        known.update(chunks)
    return in_prefixes, in_chunks


def _tokenizer(llm: LLM) -> Callable[[str], NDArray[np.int32]]:
    return lambda text: llm.tokenize(text).astype(np.int32)


def _measured(records: Sequence[Record], settings: DatasetsSettings) -> Row:
    """Columns of the sample: times of all requests and of hits, how near hits are, scores where right answers are known."""
    hits = [record for record in records if record["on"]["is_grafted"]]
    off, on = milliseconds(records, "off", settings.clock), milliseconds(records, "graft", settings.clock)
    hit_times = [milliseconds(hits, mode, settings.clock) for mode in ("off", "graft")]
    prompt_tokens = sum(record["on"]["prompt_tokens"] for record in records)
    reused = sum(reused_tokens(record["on"]) for record in records)
    scored = [record for record in records if "task" in record["off"]]
    return {
        "sample": len(records),
        "hits": len(hits),
        "sample_tokens": mean([record["num_tokens"] for record in records]),
        "sample_reused_share": reused / prompt_tokens if prompt_tokens else None,
        **off_and_on(off, on),
        **with_interval("speedup_all_ratio", ratio_of_sums, [off, on], settings.seed),
        **with_interval("speedup_hits_ratio", ratio_of_sums, hit_times, settings.seed),
        **fidelity_figures([record["on"] for record in hits], settings.seed),
        "scored": len(scored),
        **task_scores(scored, settings.seed),
    }


TABLE = MeasuredTable(
    "datasets",
    "What data sets share, and what reuse makes of it",
    "Count what an exact prefix, aligned chunks, kvgraft and the bound find in every prompt of each data set, planning only; "
    "then time, compare and score a seeded sample of the prompts that fit, with reuse off and with the engine's own policy. "
    "'builtin' and 'builtin:rag' need no file; packs that are not in --data are left out and named.",
    DatasetsSettings,
    ("suite", "index"),
    measure,
)
