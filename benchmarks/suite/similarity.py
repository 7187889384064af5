"""Table T2: reuse, time and answers when a known document comes back edited.

Each document is read once, after one instruction; then every variant of it is asked after another. What is reused is
compared token by token with what was read, and beside it stand how much any exact method could find and how much alike prompt
and donor look to a cache that goes by similarity.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.bound import covered_positions
from kvgraft.bench.fidelity.measure import Instrument
from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.fidelity.rows import reused_tokens
from kvgraft.bench.fidelity.sample import SampledRequest
from kvgraft.bench.fidelity.settings import default_setting
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.errors import ConfigError

from .edits import Document, documents, edited, reworded
from .measured import MeasuredTable
from .read_prompts import cosine
from .settings import TableSettings, clock_option, option
from .statistics import fidelity_figures, mean, off_and_on, ratio_of_sums, task_scores, with_interval
from .timing import first_token_times, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM
    from kvgraft.types import GraftReport, TokenArray

    Record = Mapping[str, Any]
    Row = dict[str, Any]

REWORDED, UNRELATED = "reworded", "another document"
_INSTRUCTION = "Answer the question using the passages. Say nothing else."
_NEW_INSTRUCTION = (
    "You are a librarian of code who is asked for one name at a time. Descriptions of functions and classes follow, then "
    "the question. Answer with the name alone, as it is written above its description."
)
_METRIC = "f1"
_MARGIN_TOKENS = 512


@dataclass(frozen=True)
class SimilaritySettings(TableSettings):
    """Edits, a row each, and documents."""

    edits: tuple[float, ...] = option((0.0, 0.01, 0.05, 0.2, 0.5), "shares of the sentences that are replaced, 0 to 1")
    documents: int = option(6, "documents per row", least=1)
    passages: int = option(16, "descriptions per document, of some 130 tokens each", least=2)
    rounds: int = option(3, "how often each prompt is timed, off and on in turns", least=1)
    clock: str = clock_option()
    min_run: int = option(16, "shortest run of equal tokens that counts for the bound", least=1)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the rows: edits in percent, then the negative controls."""
        return (*(f"{share:.0%}" for share in self.edits), REWORDED, UNRELATED)

    @property
    def num_steps(self) -> int:
        """Documents of all rows."""
        return self.documents * len(self.variants)


@dataclass(frozen=True, slots=True)
class Variant:
    """A document as it comes back.

    Attributes:
        name: Of the row.
        document: What is asked about.
        edited_share: Sentences that were really replaced, over all; None for what is no edit.
        passage: Number of the passage that the question is about.
    """

    name: str
    document: Document
    edited_share: float | None
    passage: int

    def request(self, number: int) -> FidelityRequest:
        """Ask for the name of the passage, after the new instruction; `number` is the document's."""
        passage = self.document.passages[self.passage]
        name = passage.name
        parts = (_NEW_INSTRUCTION, self.document.text, _question(passage.summary))
        return FidelityRequest(
            f"{number} {self.name}", tuple(map(Part, parts)), (), self.name, (name, name.rpartition(".")[2])
        )


def measure(llm: LLM, settings: SimilaritySettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per edit and negative control; `advance` is called once per document and row.

    Raises:
        ConfigError: The documents are too long for the model.
    """
    subject = Subject(llm, llm.max_model_len)
    setting = default_setting(llm)
    bench = _EditMeasurement(llm, settings, Instrument(llm, subject, [setting]), subject, setting.label)
    # The last document is where other sentences are from.
    drawn = documents(settings.documents + 1, settings.passages, settings.seed)
    stock = drawn[-1]
    for number, document in enumerate(drawn[:-1]):
        llm.reset()
        donor = first_prompt(document)
        is_read = False
        for variant in variants(document, stock, settings, number):
            if (variant.name, number) not in journal:
                if not is_read:
                    bench.read(donor)
                    is_read = True
                journal.add(bench.measured(variant, number, donor))
            advance()
    return [_row(name, list(journal.under(name)), settings) for name in settings.variants]


def first_prompt(document: Document) -> str:
    """The prompt that is read before: another instruction, and a question about the first passage."""
    return "\n\n".join((_INSTRUCTION, document.text, _question(document.passages[0].summary)))


def variants(document: Document, stock: Document, settings: SimilaritySettings, number: int) -> list[Variant]:
    """Everything that is asked about a document that was read.

    Args:
        document: As it was read.
        stock: Where other sentences are from; the document that has nothing of this one.
        settings: Which edits.
        number: Of the document; chooses the passage that is asked about, which no edit changes.
    """
    asked = 1 + number % (len(document.passages) - 1)
    found = []
    for place, share in enumerate(settings.edits):
        rng = random.Random(f"{settings.seed} {number} {place}")
        changed, real = edited(document, share, stock, asked, rng)
        found.append(Variant(f"{share:.0%}", changed, real, asked))
    found.append(Variant(REWORDED, reworded(document), None, asked))
    found.append(Variant(UNRELATED, stock, None, asked))
    return found


def wrong_tokens(report: GraftReport, prompt: TokenArray, donor: TokenArray) -> int:
    """Count reused positions of `prompt` with the K/V of another token, `donor` being all that was read."""
    return sum(
        int(
            np.sum(
                prompt[span.target_start : span.target_start + span.length]
                != donor[span.donor_start : span.donor_start + span.length]
            )
        )
        for span in report.spans
    )


class _EditMeasurement:
    """Measures prompts over a donor that lies in the cache."""

    def __init__(
        self, llm: LLM, settings: SimilaritySettings, instrument: Instrument, subject: Subject, label: str
    ) -> None:
        self._llm, self._settings, self._label = llm, settings, label
        self._instrument, self._subject = instrument, subject

    def read(self, donor: str) -> None:
        """Read a prompt.

        Raises:
            ConfigError: It is too long.
        """
        length = len(self._subject.encode(donor))
        if length + _MARGIN_TOKENS > self._subject.longest:
            raise ConfigError(
                f"a document of {self._settings.passages} passages makes a prompt of {length} tokens, and there is room for "
                f"{self._subject.longest - _MARGIN_TOKENS}; give a lower --passages or a higher --num-slots"
            )
        self._instrument.read(donor)

    def measured(self, variant: Variant, number: int, donor: str) -> Row:
        """Compare, time and count; figures only."""
        request = variant.request(number)
        asked = self._instrument.ask(request, _METRIC)
        record = self._instrument.measure(SampledRequest(number, request, (), is_read=False), asked)
        times, report = first_token_times(self._llm, asked.prompt, self._settings.rounds)
        read = self._subject.encode(donor)
        bound = covered_positions([read.astype(np.int32), asked.prompt.astype(np.int32)], self._settings.min_run)[1]
        return {
            "suite": variant.name,
            "index": number,
            "off": record["off"],
            "on": record["settings"][self._label],
            "times": times,
            "tokens": len(asked.prompt),
            "bound_tokens": int(bound.sum()),
            "wrong_tokens": wrong_tokens(report, asked.prompt, read),
            "cosine": cosine(read, asked.prompt),
            "edited_share": variant.edited_share,
        }


def _question(summary: str) -> str:
    return f'Question: Which entry says this: "{summary}"\nAnswer:'


def _row(name: str, records: Sequence[Record], settings: SimilaritySettings) -> Row:
    """Shares of all tokens, medians of times, and means over the documents."""
    off, on = (milliseconds(records, mode, settings.clock) for mode in ("off", "graft"))
    tokens = sum(record["tokens"] for record in records)
    reused = sum(reused_tokens(record["on"]) for record in records)
    edits = [record["edited_share"] for record in records if record["edited_share"] is not None]
    return {
        "variant": name,
        "kind": "negative control" if name in (REWORDED, UNRELATED) else "edit",
        "documents": len(records),
        "edited_share": mean(edits),
        "tokens": tokens / len(records),
        "cosine": mean([record["cosine"] for record in records]),
        "bound_share": sum(record["bound_tokens"] for record in records) / tokens,
        "reused_share": reused / tokens,
        "hits": sum(record["on"]["is_grafted"] for record in records),
        "wrong_tokens": sum(record["wrong_tokens"] for record in records),
        **off_and_on(off, on),
        **with_interval("speedup_ratio", ratio_of_sums, [off, on], settings.seed),
        **fidelity_figures([record["on"] for record in records], settings.seed),
        **task_scores(records, settings.seed),
    }


TABLE = MeasuredTable(
    "similarity",
    "Documents that were edited",
    "Read documents of the standard library's descriptions, then ask about them after another instruction: as they were, "
    "with 1, 5, 20 and 50 %% of their sentences replaced, reworded, and about another document. Gives what is reused beside "
    "what could be, wrong tokens, time, KL and scores. Needs no file.",
    SimilaritySettings,
    ("suite", "index"),
    measure,
)
