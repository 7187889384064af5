"""What is stored and what is asked for in `discovery.py`: each question names the stored texts that it has something of.

From a folder of packs, or from what every machine has: documentation of the standard library, and the sentences below.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.bench.fidelity.suites import load_suite
from kvgraft.bench.packs import read_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SYSTEM = "You are a careful assistant. Read what follows, then answer briefly and say so if you cannot.\n\n"
"""In front of every prompt that is made here: what stores have in common."""

_EDITED_SHARE = 0.1
_DOCUMENT_CHARACTERS = 2_000

PARAPHRASES = (
    (
        "The bridge of the town is old. It has twelve arches of grey stone and nobody crosses it at night.",
        "In the town there is an ancient bridge with a dozen arches made of grey stone; after dark it is deserted.",
        "The bridge of the town is new. It has two arches of grey stone and everybody crosses it at night.",
    ),
    (
        "The committee approved the budget on Monday. Schools receive four million more than last year.",
        "On Monday the budget was passed by the committee, which gives schools an extra four million over last year.",
        "The committee rejected the budget on Monday. Schools receive four million less than last year.",
    ),
    (
        "Take one tablet of 5 mg with water every morning. Do not take it together with alcohol.",
        "Each morning a 5 mg pill should be swallowed with water, and alcohol must be avoided while taking it.",
        "Take one tablet of 50 mg with water every evening. You may take it together with alcohol.",
    ),
    (
        "The train from Lyon arrives at nine and continues to Geneva after a stop of ten minutes.",
        "At nine o'clock the service coming from Lyon pulls in, pauses ten minutes, and then goes on to Geneva.",
        "The train from Geneva arrives at ten and continues to Lyon after a stop of nine minutes.",
    ),
    (
        "Heavy rain flooded the valley in spring, and the farmers lost most of their wheat.",
        "Most of the wheat crop was lost by farmers when spring downpours put the valley under water.",
        "No rain fell on the valley in spring, and the farmers saved most of their wheat.",
    ),
    (
        "The parser reads one line at a time and raises an error if a quotation mark is not closed.",
        "Input is parsed line by line; an unterminated quote causes an exception.",
        "The parser reads the whole file at once and ignores quotation marks that are not closed.",
    ),
    (
        "She moved to Lisbon in 1987 to study music and stayed there for the rest of her life.",
        "In order to study music she went to live in Lisbon in 1987, never to leave it again.",
        "She moved to Lisbon in 1978 to study law and left it after the first year.",
    ),
    (
        "The museum is closed on Tuesdays. On other days visitors under twelve enter for free.",
        "Children below the age of twelve need no ticket to the museum, which does not open on Tuesdays.",
        "The museum is open on Tuesdays only. On that day visitors over twelve enter for free.",
    ),
)
"""A text, the same in other words, and one that says something else in nearly the same words."""


@dataclass
class Suite:
    """Texts that are stored, and questions with the names of the stored texts that they share content with, if any."""

    name: str
    stored: dict[str, str] = field(default_factory=dict)
    questions: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def limited(self, questions: int) -> Suite:
        """Keep the first questions."""
        return Suite(self.name, self.stored, self.questions[:questions])


def suites(data: Path | None, limit: int) -> list[Suite]:
    """Build all suites, with `limit` questions each."""
    documents = _documents(data)
    built = [
        documents,
        _edited(documents),
        _templates(data, documents),
        _paraphrased(data),
        _contradicting(data),
        _unrelated(data, documents),
    ]
    return [suite.limited(limit) for suite in built]


def _documents(data: Path | None) -> Suite:
    """Passages, and prompts of an instruction, several of them and a question."""
    requests = load_suite("builtin" if data is None else str(data / "rag"), "").requests
    suite = Suite("rag")
    for request in requests:
        for part in request.parts:
            if part.document is not None:
                suite.stored[part.document] = SYSTEM + part.text
        suite.questions.append((SYSTEM + request.prompt, request.keys))
    return suite


def _edited(documents: Suite) -> Suite:
    """Documents with sentences in another order and a tenth of the words replaced."""
    rng = random.Random(0)
    suite = Suite("edited", documents.stored)
    words = " ".join(documents.stored.values()).split()
    for name, text in sorted(documents.stored.items()):
        sentences = re.split(r"(?<=[.:;])\s+", text.removeprefix(SYSTEM))
        rng.shuffle(sentences)
        edited = [rng.choice(words) if rng.random() < _EDITED_SHARE else word for word in " ".join(sentences).split()]
        suite.questions.append((SYSTEM + " ".join(edited), (name,)))
    rng.shuffle(suite.questions)
    return suite


def _templates(data: Path | None, documents: Suite) -> Suite:
    """The same text under another instruction."""
    suite = Suite("xtemplate")
    if data is None:
        for name, text in documents.stored.items():
            suite.stored[name] = text + "\n\nSummarise this in one sentence."
            suite.questions.append(("List the main points of:\n\n" + text.removeprefix(SYSTEM), (name,)))
        return suite
    for record in _records(data / "xtemplate.jsonl.gz"):
        name = f"{record['dataset']}/{record['row']}"
        text = str(record["input"])[: 3 * _DOCUMENT_CHARACTERS]
        if name in suite.stored:
            suite.questions.append((text, (name,)))
        else:
            suite.stored[name] = text
    return suite


def _paraphrased(data: Path | None) -> Suite:
    """The same in other words: an article for its summary, or the sentences above."""
    suite = Suite("paraphrased")
    if data is None:
        for number, (text, paraphrase, _) in enumerate(PARAPHRASES):
            suite.stored[str(number)] = SYSTEM + text
            suite.questions.append((SYSTEM + paraphrase, (str(number),)))
        return suite
    for record in _records(data / "xtemplate.jsonl.gz"):
        name, answers = f"{record['dataset']}/{record['row']}", record.get("answers")
        if name not in suite.stored and isinstance(answers, list) and len(str(answers[0])) > 80:
            suite.stored[name] = SYSTEM + str(record["input"])[:_DOCUMENT_CHARACTERS]
            suite.questions.append((SYSTEM + str(answers[0])[:_DOCUMENT_CHARACTERS], (name,)))
    return suite


def _contradicting(data: Path | None) -> Suite:
    """A text whose answer is another: what is found is a source by its words, and wrong by what it says."""
    suite = Suite("contradicting")
    if data is None:
        for number, (text, _, contradiction) in enumerate(PARAPHRASES):
            suite.stored[str(number)] = SYSTEM + text
            suite.questions.append((SYSTEM + contradiction, (str(number),)))
        return suite
    for record in _records(data / "adversarial.pairs.jsonl"):
        suite.stored[str(record["pid"])] = f"{SYSTEM}{record['a']}\n\n{record['question']}"
        suite.questions.append((f"{SYSTEM}{record['b']}\n\n{record['question']}", (str(record["pid"]),)))
    return suite


def _unrelated(data: Path | None, documents: Suite) -> Suite:
    """Questions that have nothing to do with what is stored, but for the system prompt."""
    if data is None:
        texts = [text for texts in PARAPHRASES for text in texts]
    else:
        texts = [str(record["input"]) for record in _records(data / "arena_hard_v01.jsonl.gz")]
    return Suite("unrelated", documents.stored, [(SYSTEM + text[:_DOCUMENT_CHARACTERS], ()) for text in texts])


def _records(path: Path) -> Iterable[dict[str, object]]:
    return (record for _, record in read_records(path))
