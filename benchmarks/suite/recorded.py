"""Table T12: what the recorded sessions of agent clients cost: tokens computed, with exact prefixes alone and with copies.

Packs of token ids, a prompt per call in order of arrival, each as what it adds to the one before it. Every pack is asked in
an engine of its own for each mode: one that has read nothing, and one that has read the first prompt of another client. Two
random layers compute them: what is counted depends on no weights. Rows name their engine, so that others' go beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.deadline import Deadline
from kvgraft.bench.recorded import bound_of, read_pack, two_random_layers
from kvgraft.donors import set_process_secret
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError

from .measured import MeasuredTable
from .settings import TableSettings, minutes_option, option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.journal import Journal

    Row = dict[str, Any]
    Prompt = NDArray[np.int64]

ENGINE = "kvgraft"
CLIENTS = ("claude", "cline", "codex", "continue", "aider")
MODES = ("exact", "graft")
NOTHING = "nothing"
"""Read before; otherwise a client."""
_ANSWER = SamplingParams(2, ignore_eos=True)
_SLOTS = 400_000


@dataclass(frozen=True)
class RecordedSettings(TableSettings):
    """Clients, and with how many secrets the figures of one are taken again."""

    names: tuple[str, ...] = option((), f"clients, of {', '.join(CLIENTS)}")
    data: str = option("../shared/data/agents", "folder of packs; those that are not there are left out")
    limit: int = option(0, "calls of each, from the first on (0: all)", least=0)
    secrets: int = option(10, "anchors depend on a secret per process: so many for the first pair of clients", least=1)
    minutes: float = minutes_option()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Clients that are measured where their packs are."""
        unknown = sorted(set(self.names) - set(CLIENTS))
        if unknown:
            raise ConfigError(f"there is no client {unknown[0]!r}; choose of {', '.join(CLIENTS)}")
        return self.names or CLIENTS

    @property
    def present(self) -> tuple[str, ...]:
        """Clients with a pack on this machine."""
        return tuple(name for name in self.chosen if _path(self.data, name).is_file())

    @property
    def absent(self) -> tuple[str, ...]:
        """Clients without one."""
        return tuple(name for name in self.chosen if not _path(self.data, name).is_file())

    @property
    def pairs(self) -> list[tuple[str, str, int]]:
        """Client, what was read before, and number of the secret; what has nothing before it comes first."""
        alone = [(client, NOTHING, 0) for client in self.present]
        seeded = [(client, seed, 0) for client in self.present for seed in self.present if seed != client]
        # Two clients whose figures went furthest apart before text could go on.
        apart = [("cline", "claude", number) for number in range(1, self.secrets)]
        return [*alone, *seeded, *(pair for pair in apart if {"cline", "claude"} <= {*self.present})]

    @property
    def num_steps(self) -> int:
        """Packs that are asked."""
        return len(self.pairs)


def prepare(llm: LLM, settings: RecordedSettings) -> LLM:
    """Return an engine over two random layers that take the longest prompts; the model asked for computes nothing."""
    model = two_random_layers(settings.seed)
    own = replace(llm.config, num_slots=_SLOTS, heal="off")
    return LLM(adopt_model("two random layers", model, llm.loaded.tokenizer), own)


def measure(llm: LLM, settings: RecordedSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per client and what was read before it; `advance` is called once per pack that is asked.

    Raises:
        ConfigError: No pack is there.
    """
    if not settings.present:
        raise ConfigError(f"no pack of {', '.join(settings.chosen)} is in {settings.data}; give --data DIR")
    deadline = Deadline.after(60 * settings.minutes or math.inf)
    for client, seed, secret in settings.pairs:
        if (client, seed, secret) not in journal and not deadline.is_over:
            journal.add(
                {"client": client, "before": seed, "secret": secret, **_asked(llm, settings, client, seed, secret)}
            )
        advance()
    found = [journal.get(*pair) for pair in settings.pairs]
    records = [record for record in found if record is not None]
    return [_row(record, records) for record in records if not record["secret"]]


def _path(data: str, client: str) -> Path:
    return Path(data) / f"{client}.jsonl.gz"


def _asked(llm: LLM, settings: RecordedSettings, client: str, before: str, secret: int) -> Row:
    """Computed tokens of every call by mode, and the bound."""
    prompts = read_pack(_path(settings.data, client), settings.limit)
    known = [] if before == NOTHING else read_pack(_path(settings.data, before), 1)
    set_process_secret(secret.to_bytes(32, "little"))
    # Exact prefixes have no anchors.
    computed = {mode: _computed(llm, mode, known, prompts) for mode in (MODES[1:] if secret else MODES)}
    tokens = sum(map(len, prompts))
    return {"tokens": tokens, "bound": bound_of(known, prompts), **computed}


def _computed(llm: LLM, mode: str, before: Sequence[Prompt], prompts: Sequence[Prompt]) -> list[int]:
    asked = LLM(llm.loaded, llm.config)
    reports = [asked.generate(prompt, _ANSWER, mode)[0].report for prompt in (*before, *prompts)]
    asked.close()
    return [int(report.computed_tokens) for report in reports[len(before) :]]


def _row(record: Row, records: Sequence[Row]) -> Row:
    """Sums over the calls, how far `exact` was ahead at the worst of them, and how far secrets are apart."""
    exact, graft = (np.cumsum(record[mode]) for mode in MODES)
    again = [
        sum(each["graft"])
        for each in records
        if (each["client"], each["before"]) == (record["client"], record["before"])
    ]
    return {
        "engine": ENGINE,
        "client": record["client"],
        "before": record["before"],
        "calls": len(exact),
        "tokens": record["tokens"],
        "bound_tokens": record["bound"],
        "exact_tokens": int(exact[-1]),
        "graft_tokens": int(graft[-1]),
        "graft_of_exact": float(graft[-1] / exact[-1]),
        "graft_of_bound": float(graft[-1] / max(1, record["bound"])),
        "worst_lead_tokens": int((graft - exact).max()),
        "worst_of_exact": float((graft / exact).max()),
        "secrets": len(again),
        "spread_share": float((max(again) - min(again)) / np.median(again)) if len(again) > 1 else None,
    }


TABLE = MeasuredTable(
    "recorded",
    "What sessions of agent clients cost",
    "Ask the recorded calls of agent clients, with exact prefixes alone and as by default, in an engine that has read "
    "nothing and in one that has read another client's first prompt; count the tokens that are computed. Two random layers "
    "compute them, whatever --model is. Packs that are not in --data are left out and named.",
    RecordedSettings,
    ("client", "before", "secret"),
    measure,
    prepare,
)
