"""A request pack of the rows of a data set: documents once, and requests that name them in order of arrival."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from kvgraft.bench.datasets.conversations import conversations
from kvgraft.bench.datasets.documents import asked_documents
from kvgraft.bench.datasets.known import CONVERSATION
from kvgraft.bench.datasets.rows import read_rows
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvgraft.bench.datasets.known import PublicDataset
    from kvgraft.bench.datasets.rows import Row

INSTRUCTIONS = (
    "Read the text below and do what is asked after it.",
    "You are a careful assistant. Answer from the following text alone, in as few words as you can.",
    "Below is a text, and a task that refers to it.",
    "Use nothing but this text; if it does not say, say so.",
)
"""What stands before a document, in turns: equal text comes again at other positions, and no exact prefix has it."""
_SUMMARISE = "Summarise the text."


@dataclass(frozen=True, slots=True)
class PackSettings:
    """What is made of a data set.

    Attributes:
        limit: Most conversations or documents that are used; questions of one row count once.
        seed: Of the order of arrival of requests over documents; conversations come as the file has them.
        instructions: Stand before documents, in turns.

    Raises:
        ConfigError: `limit` is below 1, or there is no instruction.
    """

    limit: int = 1_000
    seed: int = 0
    instructions: tuple[str, ...] = INSTRUCTIONS

    def __post_init__(self) -> None:
        if self.limit < 1 or not self.instructions:
            raise ConfigError(
                "a pack needs at least one row and one instruction; raise the limit or give an instruction"
            )


@dataclass(slots=True)
class Pack:
    """Lines of `NAME.requests.jsonl` in order of arrival, and the lines of `NAME.docs.jsonl` by their text.

    Equal passages have one line.
    """

    requests: list[dict[str, object]] = field(default_factory=list)
    documents: dict[str, int] = field(default_factory=dict)

    def add(self, group: str, parts: Sequence[object], answers: Sequence[str]) -> None:
        """Add a request."""
        known = {"answers": list(answers)} if answers else {}
        self.requests.append({"group": group, "parts": list(parts), **known})

    def name_of(self, passage: str) -> int:
        """Return the `doc` of a passage."""
        return self.documents.setdefault(passage, len(self.documents))


def make_pack(dataset: PublicDataset, files: Sequence[Path], settings: PackSettings) -> Pack:
    """Read the files one after the other and make a pack of their rows.

    Raises:
        ConfigError: A file cannot be read, a row lacks a field that the data set has, or nothing is left to ask.
        ImportError: A file is Parquet and pyarrow is not installed.
    """
    rows = chain.from_iterable(read_rows(path) for path in files)
    made = _of_conversations if dataset.shape == CONVERSATION else _of_documents
    pack = made(dataset, rows, settings)
    if not pack.requests:
        raise ConfigError(
            f"{', '.join(map(str, files))}: no request can be made of the rows: texts are empty, too short or alone; "
            "look at the fields, and at --min-characters"
        )
    return pack


def write_pack(pack: Pack, folder: Path, name: str) -> Path:
    """Write the pack into a folder, which is made; return the path of its requests.

    Raises:
        ConfigError: It cannot be written.
    """
    path, docs = folder / f"{name}.requests.jsonl", folder / f"{name}.docs.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        docs.unlink(missing_ok=True)  # of a pack of that name that had documents
        if pack.documents:
            _write_lines(docs, ({"doc": number, "text": text} for text, number in pack.documents.items()))
        _write_lines(path, ({"rid": number, **request} for number, request in enumerate(pack.requests)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give another folder for --output") from error
    return path


def _write_lines(path: Path, records: Iterable[object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def _of_conversations(dataset: PublicDataset, rows: Iterator[tuple[str, Row]], settings: PackSettings) -> Pack:
    pack = Pack()
    for session, prompts in islice(conversations(dataset, rows), settings.limit):
        for prompt in prompts:
            answers = [] if prompt.answer is None else [prompt.answer]
            pack.add(session, [{"text": text} for text in prompt.parts], answers)
    if dataset.joins_turns:  # of users with one conversation nothing is asked that they could have said before
        sizes = Counter(request["group"] for request in pack.requests)
        pack.requests = [request for request in pack.requests if sizes[request["group"]] > 1]
    return pack


def _of_documents(dataset: PublicDataset, rows: Iterator[tuple[str, Row]], settings: PackSettings) -> Pack:
    pack, askings = Pack(), Counter[str]()
    for asked in islice(asked_documents(dataset, rows), settings.limit):
        names = [pack.name_of(passage) for passage in asked.passages]
        group = " ".join(map(str, names))
        for question, answers in asked.questions:
            ending = f"Question: {question}\nAnswer:" if question else _SUMMARISE
            for _ in range(dataset.askings):
                instruction = settings.instructions[askings[group] % len(settings.instructions)]
                askings[group] += 1
                pack.add(group, [{"text": instruction}, *({"doc": name} for name in names), {"text": ending}], answers)
    random.Random(settings.seed).shuffle(pack.requests)
    return pack
