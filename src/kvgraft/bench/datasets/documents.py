"""Documents of rows, with what is asked about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.bench.datasets.known import QUESTION
from kvgraft.bench.datasets.rows import field_of, texts_of, value_at
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.bench.datasets.known import PublicDataset
    from kvgraft.bench.datasets.rows import Row

    Rows = Iterator[tuple[str, Row]]


@dataclass(frozen=True, slots=True)
class AskedDocument:
    """A document and the questions of its row.

    Attributes:
        passages: Its parts in order, at least one.
        questions: Each with the answers that are right, maybe none; an empty question asks for a summary.
    """

    passages: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]


def asked_documents(dataset: PublicDataset, rows: Rows) -> Iterator[AskedDocument]:
    """Yield the documents of `rows` that have a text of enough characters and something to ask about it.

    Raises:
        ConfigError: A row has no such field, or more answers or fewer than questions.
    """
    read = _joined_lines(dataset, rows) if dataset.first_line else (_asked(dataset, row, line) for line, row in rows)
    for found in read:
        if found.passages and found.questions and sum(map(len, found.passages)) >= dataset.min_characters:
            yield found


def _asked(dataset: PublicDataset, row: Row, line: str) -> AskedDocument:
    document = field_of(row, dataset.fields["document"], "document", line)
    texts = texts_of(document)
    answers = next(
        (found for path in dataset.fields.get("answers", ()) if texts_of(found := value_at(row, path))), None
    )
    if dataset.last_line_asks and texts:
        body, _, question = texts[-1].rpartition("\n")
        return AskedDocument(_passages(dataset, [*texts[:-1], body]), ((question, tuple(texts_of(answers))),))
    if dataset.shape != QUESTION:
        return AskedDocument(_passages(dataset, texts), (("", tuple(texts_of(answers))),))
    questions = texts_of(field_of(row, dataset.fields["question"], "question", line))
    return AskedDocument(
        _passages(dataset, texts), tuple(zip(questions, _answers(questions, answers, line), strict=True))
    )


def _answers(questions: list[str], answers: object, line: str) -> list[tuple[str, ...]]:
    """Return the answers of each question: of several, each has the item of its own in a list of as many."""
    if len(questions) == 1 or answers is None:
        return [tuple(texts_of(answers))] * len(questions)
    if not isinstance(answers, list) or len(answers) != len(questions):
        raise ConfigError(f"{line}: the answers are no list of {len(questions)}, one per question; give --answers PATH")
    return [tuple(texts_of(each)) for each in answers]


def _passages(dataset: PublicDataset, texts: list[str]) -> tuple[str, ...]:
    """Return the parts of a document; those that are cut at a separator are parts of their own."""
    parts = [part for text in texts for part in (text.split(dataset.separator) if dataset.separator else [text])]
    return tuple(part.strip() for part in parts if part.strip())


def _joined_lines(dataset: PublicDataset, rows: Rows) -> Iterator[AskedDocument]:
    """Join rows that are lines, from one that begins a document to the next."""
    begins, lines = re.compile(dataset.first_line), list[str]()
    for line, row in rows:
        text = str(field_of(row, dataset.fields["document"], "document", line))
        if begins.fullmatch(text) and lines:
            yield _whole(lines)
            lines = []
        lines.append(text.rstrip("\n"))
    if lines:
        yield _whole(lines)


def _whole(lines: list[str]) -> AskedDocument:
    text = "\n".join(lines).strip()
    return AskedDocument((text,) if text else (), (("", ()),))
