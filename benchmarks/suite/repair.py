"""Table T9: what a repair before the first token, after it and with every decode step leaves of the error.

Every request is asked once per setting, one setting after another, against the model's own full prefill, so that settings are
compared request by request. What is after a repair with rows per decode step is served token by token, as a client gets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.fidelity.measure import Instrument
from kvgraft.bench.fidelity.settings import default_setting, parse_settings
from kvgraft.bench.fidelity.split import TEST
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.bench.fidelity.suites import has_suite, load_suite
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

from .measured import MeasuredTable
from .methods import ALL_SUITES
from .settings import PACKS, TableSettings, minutes_option, option
from .statistics import fidelity_figures, mean, ratio_of_sums, task_scores, with_interval
from .walk import Walk, drawn, pending_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM

    Record = Mapping[str, Any]
    Row = dict[str, Any]

SAMPLE = ("adversarial:60", "builtin:52", "tools:40", "rag:20", "xinstr:7")
NONE = "none"
EXACT = "exact prefixes"
POLICIES = (
    NONE,
    "first_k:16+drift",
    "query_seam:0.1+drift",
    "query_seam:0.1+drift@after",
    "query_seam:0.25+drift@after",
    "query_seam:0.1+drift@after:16",
    "query_seam:0.1+drift@after:64",
)
WINDOWS = {"2": (1, 2), "3_8": (2, 8), "9_32": (8, 32)}
"""Numbers of tokens of an answer by the name of their column, from 0, end excluded."""


@dataclass(frozen=True)
class RepairSettings(TableSettings):
    """Suites, and settings of reuse.

    Raises:
        ConfigError: An entry of `sample` is not SUITE:LIMIT, or `none` is not compared.
    """

    sample: tuple[str, ...] = option(SAMPLE, "SUITE:LIMIT, held-out requests of builtin and of packs")
    data: str = option(PACKS, "folder of packs; those that are not there are left out")
    policies: tuple[str, ...] = option(POLICIES, "NAME[:RATIO][+CORRECTION][@TIME[:ROWS]] or default")
    answers_every: int = option(
        8,
        "one of so many requests of a suite is also answered by every setting itself, and served step by step",
        least=1,
    )
    controls: int = option(1, "requests per suite that are also asked with exact prefixes alone", least=0)
    max_prompt_tokens: int = option(4096, "longer prompts are not measured", least=1)
    minutes: float = minutes_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if NONE not in self.policies:
            raise ConfigError(f"--policies has no {NONE!r}, of whose error the others are a share; add it")
        for each in self.sample:
            suite, _, limit = each.partition(":")
            if not suite or not limit.isdecimal() or not int(limit):
                raise ConfigError(f"--sample has {each!r}; give SUITE:LIMIT, such as builtin:50")

    @property
    def limits(self) -> dict[str, int]:
        """Requests by suite that is on this machine."""
        limits = {name: int(limit) for name, _, limit in (each.partition(":") for each in self.sample)}
        return {name: limit for name, limit in limits.items() if has_suite(name, self.data)}

    @property
    def absent(self) -> tuple[str, ...]:
        """Suites that need a pack that is not on this machine."""
        return tuple(name for name, *_ in (each.partition(":") for each in self.sample) if name not in self.limits)

    @property
    def num_steps(self) -> int:
        """Requests of all suites."""
        return sum(self.limits.values())


def measure(llm: LLM, settings: RepairSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per suite and setting, and per setting over all suites; `advance` is called once per request."""
    subject = Subject(llm, settings.max_prompt_tokens)
    compared = parse_settings(settings.policies, [], default_setting(llm))
    instrument = Instrument(llm, subject, compared)
    probing = Instrument(llm, subject, [each for each in compared if not each.heals])
    walks = [
        drawn(load_suite(name, settings.data), subject, side=TEST, limit=limit, seed=settings.seed)
        for name, limit in settings.limits.items()
    ]
    controlled = {walk.suite.name: frozenset(walk.indices[: settings.controls]) for walk in walks}
    answered = {walk.suite.name: walk.indices[settings.answers_every - 1 :: settings.answers_every] for walk in walks}
    read = [with_read(walk, controlled[walk.suite.name]) for walk in walks]
    for suite, step, _ in pending_steps(read, llm, instrument, journal, advance, minutes=settings.minutes):
        asked = instrument.ask(step.request, suite.metric)
        if step.index in answered[suite.name]:
            figures = instrument.measure(step, asked)
        else:
            unscored = replace(asked, request=replace(asked.request, answers=()))
            figures = probing.measure(step, unscored)
        del figures["group"]  # of pairs, the beginning of their text
        record: dict[str, Any] = {"suite": suite.name} | figures
        if step.index in controlled[suite.name]:
            instrument.read(step.request.prompt)
            record["exact"] = instrument.control(asked, ReuseMode.EXACT)
        journal.add(record)
    return _rows(journal, walks, [each.label for each in compared], settings.seed)


def with_read(walk: Walk, indices: frozenset[int]) -> Walk:
    """Return the walk with these requests read after their measurement, as controls do, so that a resumed one is alike."""
    blocks = tuple(
        tuple(replace(step, is_read=step.is_read or step.index in indices) for step in block) for block in walk.blocks
    )
    return replace(walk, blocks=blocks)


def _rows(journal: Journal, walks: Sequence[Walk], labels: Sequence[str], seed: int) -> list[Row]:
    found = {walk.suite.name: list(journal.under(walk.suite.name)) for walk in walks}
    if len(found) > 1:
        found = {ALL_SUITES: [record for records in found.values() for record in records]} | found
    rows = []
    for suite, records in found.items():
        for label in labels:
            grafted = [record for record in records if record["settings"].get(label, {}).get("is_grafted")]
            rows += [_row(suite, label, grafted, seed)] if grafted else []
        rows += _exact_row(suite, records, seed)
    return rows


def _row(suite: str, label: str, grafted: Sequence[Record], seed: int) -> Row:
    """Figures of a setting over the requests into which something was grafted, and its error as a share of `none`'s."""
    figures = [record["settings"][label] for record in grafted]
    none = [record["settings"][NONE] for record in grafted]

    def column(name: str) -> list[float]:
        return [each[name] for each in figures if name in each]

    def share_of_none(start: int, stop: int | None) -> list[list[float]]:
        return [_errors(side, start, stop) for side in (figures, none)]

    return {
        "suite": suite,
        "setting": label,
        "requests": len(grafted),
        "recomputed_share": mean(column("recomputed_share")),
        "flops_share": mean(column("flops_share")),
        **fidelity_figures(figures, seed),
        **with_interval("kl_ratio", ratio_of_sums, share_of_none(0, None), seed),
        **with_interval("first_kl_ratio", ratio_of_sums, share_of_none(0, 1), seed),
        **with_interval("later_kl_ratio", ratio_of_sums, share_of_none(1, None), seed),
        **{
            f"kl_ratio_{name}": ratio_of_sums(*map(np.asarray, share_of_none(*window)))
            for name, window in WINDOWS.items()
        },
        "nearer_share": mean([own["mean_kl"] < other["mean_kl"] for own, other in zip(figures, none, strict=True)]),
        "first_kl": mean(column("first_kl")),
        "top1_share": mean(column("top1")),
        **_scores(grafted, label, seed),
    }


def _errors(figures: Iterable[Record], start: int, stop: int | None) -> list[float]:
    return [float(np.mean(each["token_kl"][start:stop])) for each in figures]


def _scores(grafted: Sequence[Record], label: str, seed: int) -> Row:
    """Scores of answers of full prefill and of the setting, where right answers are known."""
    scored = [{"off": record["off"], "on": record["settings"][label]} for record in grafted if "task" in record["off"]]
    return {"scored": len(scored), **task_scores(scored, seed)}


def _exact_row(suite: str, records: Sequence[Record], seed: int) -> list[Row]:
    """The control: what is said with exact prefixes alone is a full prefill's."""
    figures = [record["exact"] for record in records if "exact" in record]
    if not figures:
        return []
    return [
        {
            "suite": suite,
            "setting": EXACT,
            "requests": len(figures),
            **fidelity_figures(figures, seed),
            "top1_share": mean([each["top1"] for each in figures]),
        }
    ]


TABLE = MeasuredTable(
    "repair",
    "Repair before and after the first token",
    "Ask held-out requests of several suites with nothing computed again, with a policy's choice computed before the first "
    "token and after it, and with further rows in every decode step; give the error of each as a share of the first one's. "
    "Packs that are not in --data are left out and named.",
    RepairSettings,
    ("suite", "index"),
    measure,
)
