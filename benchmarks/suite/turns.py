"""Table T4: agents turn by turn: what is reused, and when the first token of eight comes and the last.

Every turn is asked four times, in turns: with reuse off, with exact prefixes, as the engine does by default, and so in an
engine that has time to heal after every turn, as one has while an agent's tools run. That is an engine of its own, because
healing takes what it finds; the other modes have a tenant each (`cache_salt`). So none finds what another one left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.agents import AGENT_KINDS, AgentPrompt, AgentSettings, agent_prompts
from kvgraft.bench.packs import PackSession, Workload
from kvgraft.bench.reuse import measure_reuse
from kvgraft.bench.timed_answer import timed_answer
from kvgraft.bench.ttft import SHORT_ANSWER
from kvgraft.engine import LLM
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

from .measured import MeasuredTable
from .settings import TableSettings, clock_option, option
from .statistics import mean, median, percentile, ratio_of_sums, with_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.journal import Journal

    Row = dict[str, Any]

MODES = {"off": ReuseMode.OFF, "exact": ReuseMode.EXACT, "graft": ReuseMode.GRAFT, "healed": ReuseMode.GRAFT}
_EARLY_TURNS = 3
"""Turns that have rows of their own, as in the seed's table of conversations."""


@dataclass(frozen=True)
class TurnsSettings(TableSettings):
    """Kinds of agents, and the length of their sessions."""

    kinds: tuple[str, ...] = option((), "kinds of agents")
    turns: int = option(20, "turns of each kind", least=2)
    files: int = option(4, "files in every context", least=1)
    max_characters: int = option(24_000, "sessions end where a prompt would be longer; about 3 are a token", least=1000)
    min_run: int = option(32, "shortest run that planning counts", least=16)
    clock: str = clock_option()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Kinds that are measured."""
        return self.kinds or tuple(AGENT_KINDS)

    @property
    def num_steps(self) -> int:
        """Turns of all kinds."""
        return len(self.chosen) * self.turns


def measure(llm: LLM, settings: TurnsSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return rows per kind: its first turns one by one, and the others together; `advance` is called once per turn."""
    agents = AgentSettings(settings.turns, 1, settings.files, settings.max_characters, settings.seed)
    rested = LLM(llm.loaded, llm.config)
    rows: list[Row] = []
    for kind in settings.chosen:
        prompts = _that_fit(llm, agent_prompts(kind, agents))
        shares = _planned(llm, prompts, settings.min_run)
        _ask((llm, rested), kind, prompts, journal, advance)
        records = [record | shares[record["turn"]] for record in journal.under(kind) if record["turn"] < len(prompts)]
        rows += _rows(kind, records, settings)
    return rows


def _that_fit(llm: LLM, prompts: Sequence[AgentPrompt]) -> list[AgentPrompt]:
    """Return the prompts before the first that the engine refuses: a session ends there, as it does at `max_characters`.

    Raises:
        ConfigError: It refuses the first one.
    """
    fitting: list[AgentPrompt] = []
    for prompt in prompts:
        try:
            llm.validate(prompt.text, SHORT_ANSWER)
        except ConfigError:
            if not fitting:
                raise
            break
        fitting.append(prompt)
    return fitting


def _planned(llm: LLM, prompts: Sequence[AgentPrompt], min_run: int) -> list[Row]:
    """Tokens of every turn that an exact prefix finds and that any method can find, planning only."""
    workload = Workload("agents", (PackSession((), tuple(prompt.text for prompt in prompts)),))
    found = measure_reuse(workload, lambda text: llm.tokenize(text).astype(np.int32), min_run=min_run)
    return [
        {"tokens": each.tokens, "prefix_tokens": each.prefix_tokens, "bound_tokens": each.bound_tokens}
        for each in found.prompts
    ]


def _ask(
    engines: tuple[LLM, LLM],
    kind: str,
    prompts: Sequence[AgentPrompt],
    journal: Journal,
    advance: Callable[[], object],
) -> None:
    """Ask what the journal does not have; turns before it are asked, too, for they are what is reused."""
    pending = [prompt.turn for prompt in prompts if (kind, prompt.turn) not in journal]
    for one in engines:
        one.reset()
        if pending:
            one.generate(prompts[0].text, SHORT_ANSWER, ReuseMode.GRAFT, cache_salt="warm up")
    for prompt in prompts:
        if pending and prompt.turn <= pending[-1]:
            record = {"kind": kind, "turn": prompt.turn, **_turn(engines, prompt)}
            if prompt.turn in pending:
                journal.add(record)
        advance()


def _turn(engines: tuple[LLM, LLM], prompt: AgentPrompt) -> Row:
    """Times, reused tokens and first tokens of a prompt by mode; another mode comes first in every turn."""
    record: Row = {}
    llm, rested = engines
    first = prompt.turn % len(MODES)
    for name, mode in [*MODES.items()][first:] + [*MODES.items()][:first]:
        asked = rested if name == "healed" else llm
        record |= {f"{name}_{key}": value for key, value in _answer(asked, prompt.text, mode, salt=name).items()}
    return record | {"healing_tokens": rested.heal()}


def _answer(llm: LLM, prompt: str, mode: ReuseMode, *, salt: str) -> Row:
    """Milliseconds to the first token and to the last by clock, reused tokens, and the first token."""
    answer = timed_answer(llm, prompt, SHORT_ANSWER, mode, cache_salt=salt)
    row: Row = {
        "tokens": int(answer.report.reused_tokens),
        "first": answer.output.token_ids[0],
    }
    for clock, times_s in (("wall", answer.times_s), ("cpu", answer.cpu_times_s)):
        row |= {f"{clock}_ms": round(1e3 * times_s[0], 3), f"{clock}_answer_ms": round(1e3 * times_s[-1], 3)}
    return row


def _rows(kind: str, records: Sequence[Row], settings: TurnsSettings) -> list[Row]:
    """A row per early turn, and one for the others."""
    groups = [(str(number + 1), [record]) for number, record in enumerate(records[:_EARLY_TURNS])]
    others = records[_EARLY_TURNS:]
    if others:
        groups.append((f"{_EARLY_TURNS + 1}-{len(records)}", list(others)))
    return [_row(kind, turns, group, settings) for turns, group in groups]


def _row(kind: str, turns: str, records: Sequence[Row], settings: TurnsSettings) -> Row:
    total = sum(record["tokens"] for record in records)

    def share(name: str) -> float:
        return float(sum(record[f"{name}_tokens"] for record in records) / total)

    def milliseconds(kind: str) -> dict[str, list[float]]:
        key = f"{settings.clock}_{kind}"
        return {name: [float(record[f"{name}_{key}"]) for record in records] for name in MODES}

    times, answers = milliseconds("ms"), milliseconds("answer_ms")
    row: Row = {
        "kind": kind,
        "turns": turns,
        "mean_tokens": total / len(records),
        "prefix_share": share("prefix"),
        "bound_share": share("bound"),
        "exact_share": share("exact"),
        "graft_share": share("graft"),
        "healed_share": share("healed"),
        "mean_healing_tokens": mean([float(record["healing_tokens"]) for record in records]),
    }
    for name, values in times.items():
        row |= {f"{name}_ms": median(values), f"{name}_p95_ms": percentile(values, 95)}
    for name in ("exact", "graft", "healed"):
        row |= with_interval(f"{name}_speedup_ratio", ratio_of_sums, [times["off"], times[name]], settings.seed)
        sums = [answers["off"], answers[name]]
        row |= with_interval(f"{name}_answer_speedup_ratio", ratio_of_sums, sums, settings.seed)
    row |= with_interval("graft_of_exact_ratio", ratio_of_sums, [times["graft"], times["exact"]], settings.seed)
    same = [float(record["graft_first"] == record["off_first"]) for record in records]
    return row | {"same_first_token_share": mean(same)}


TABLE = MeasuredTable(
    "turns",
    "Conversations and agents, turn by turn",
    "Ask every turn of a scripted coding agent with reuse off, with exact prefixes, as by default, and so with time to heal "
    "between turns, kind by kind (see 'kvgraft bench pack agent').",
    TurnsSettings,
    ("kind", "turn"),
    measure,
)
