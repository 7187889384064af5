"""Table T10: when the tokens of an answer come: the first, the second, which waits for a repair after it, and the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.deadline import Deadline
from kvgraft.bench.fidelity.settings import Setting, default_setting, parse_settings
from kvgraft.bench.timed_answer import TimedAnswer, timed_answer
from kvgraft.bench.ttft import ONE_TOKEN, Draws
from kvgraft.engine import SamplingParams
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

from .measured import MeasuredTable
from .settings import RoundsSettings, minutes_option, option
from .statistics import array_median, median, percentile, with_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM
    from kvgraft.types import TokenArray

    Row = dict[str, Any]

OFF, HIT = "off", "exact hit"
POLICIES = (
    "none",
    "query_seam:0.1+drift",
    "query_seam:0.1+drift@after",
    "query_seam:0.25+drift@after",
    "query_seam:0.1+drift@after:16",
)


@dataclass(frozen=True)
class AnswersSettings(RoundsSettings):
    """Prompts, answers, and settings of reuse; every round has every way once."""

    lengths: tuple[int, ...] = option((600, 2048, 4096, 8000), "prompt lengths")
    shift: int = option(50, "new tokens before the document", least=1)
    question: int = option(50, "new tokens after it", least=1)
    tokens: int = option(16, "of every answer", least=3)
    policies: tuple[str, ...] = option(POLICIES, "NAME[:RATIO][+CORRECTION][@TIME[:ROWS]] or default")
    minutes: float = minutes_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.shift + self.question + 64
        if min(self.lengths) < least:
            raise ConfigError(f"--lengths must be at least --shift + --question + 64 = {least}")


def measure(llm: LLM, settings: AnswersSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per length and way; `advance` is called once per round."""
    compared = parse_settings(settings.policies, [], default_setting(llm))
    deadline = Deadline.after(60 * settings.minutes or math.inf)
    bench = _Rounds(llm, settings, compared)
    llm.validate(bench.tokens(max(settings.lengths), 0), bench.sampling)
    bench.measure(min(settings.lengths), settings.rounds)  # once per path, so that no round pays for first calls
    for number in range(settings.rounds):
        for length in settings.lengths:
            if (length, number) not in journal and not deadline.is_over:
                journal.add({"length": length, "round": number, "ways": bench.measure(length, number)})
            advance()
    ways = (OFF, HIT, *(each.label for each in compared))
    records = {length: list(journal.under(length)) for length in settings.lengths}
    return [_row(length, way, found, settings.seed) for length, found in records.items() if found for way in ways]


class _Rounds:
    """Rounds over random tokens, of one document per length and round."""

    def __init__(self, llm: LLM, settings: AnswersSettings, compared: Sequence[Setting]) -> None:
        self.sampling = SamplingParams(settings.tokens, ignore_eos=True)
        self._llm = llm
        self._settings = settings
        self._compared = compared

    def tokens(self, count: int, number: int) -> TokenArray:
        """Draw `count` tokens for a round."""
        return Draws(self._llm, (self._settings.seed, count, number)).tokens(count)

    def measure(self, length: int, number: int) -> dict[str, Row]:
        """Ask in every way, in another order each round but that `off` comes last; every prompt has new tokens of its own.

        Raises:
            ConfigError: Nothing was grafted, so that there is nothing to measure.
        """
        settings = self._settings
        draws = Draws(self._llm, (settings.seed, length, number))
        document = draws.tokens(length - settings.shift - settings.question)

        def prompt() -> TokenArray:
            return np.concatenate([draws.tokens(settings.shift), document, draws.tokens(settings.question)])

        self._llm.reset()
        self._llm.generate(document, ONE_TOKEN, ReuseMode.OFF)
        found = {}
        ways = [None, *self._compared]
        first = number % len(ways)
        for setting in [*ways[first:], *ways[:first]]:
            if setting is None:
                after = np.concatenate([document, draws.tokens(settings.shift + settings.question)])
                found[HIT] = _times(self._ask(after, ReuseMode.EXACT))
                continue
            answer = self._ask(prompt(), ReuseMode.GRAFT, setting)
            if not answer.report.spans:
                raise ConfigError(
                    f"nothing was grafted of a document of {len(document)} tokens; choose another --model"
                )
            found[setting.label] = _times(answer)
        found[OFF] = _times(self._ask(prompt(), ReuseMode.OFF))
        return found

    def _ask(self, prompt: TokenArray, reuse: ReuseMode, setting: Setting | None = None) -> TimedAnswer:
        if setting is None:
            return timed_answer(self._llm, prompt, self.sampling, reuse)
        return timed_answer(
            self._llm,
            prompt,
            self.sampling,
            reuse,
            selection=setting.policy,
            correction=setting.correction,
            repair=setting.repair,
        )


def _times(answer: TimedAnswer) -> Row:
    """Milliseconds of an answer, and the positions of its prompt that were computed."""
    seconds = {
        "ttft": answer.ttft_s,
        "second_gap": answer.second_gap_s,
        "later_gap": answer.later_gap_s,
        "total": answer.total_s,
    }
    return {f"{name}_ms": round(1e3 * value, 3) for name, value in seconds.items()} | {
        "computed_tokens": int(answer.report.computed_tokens)
    }


def _row(length: int, way: str, records: Sequence[Row], seed: int) -> Row:
    """Medians over the rounds, and medians of ratios within a round with their intervals."""

    def column(name: str, of: str = way) -> list[float]:
        return [float(record["ways"][of][name]) for record in records]

    def ratio(name: str, under: str) -> list[float]:
        return [own / other for own, other in zip(column(name), column(name, under), strict=True)]

    row: Row = {"length": length, "way": way, "rounds": len(records)}
    for name in ("ttft_ms", "second_gap_ms", "later_gap_ms", "total_ms"):
        row[name] = median(column(name))
    row["ttft_p95_ms"] = percentile(column("ttft_ms"), 95)
    row["computed_tokens"] = int(np.median(column("computed_tokens")))
    return (
        row
        | with_interval("ttft_of_hit_ratio", array_median, [ratio("ttft_ms", HIT)], seed)
        | with_interval("ttft_of_off_ratio", array_median, [ratio("ttft_ms", OFF)], seed)
        | with_interval("total_of_hit_ratio", array_median, [ratio("total_ms", HIT)], seed)
        | with_interval("total_of_off_ratio", array_median, [ratio("total_ms", OFF)], seed)
    )


TABLE = MeasuredTable(
    "answers",
    "When the tokens of an answer come",
    "For each length, in turns: nothing known (off), the document where it was read (exact hit) and the document moved, with "
    "as many new tokens, under every policy: time to the first token, from it to the second, between later ones, and of all.",
    AnswersSettings,
    ("length", "round"),
    measure,
)
