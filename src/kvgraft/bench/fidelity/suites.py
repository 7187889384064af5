"""Suites: requests with their documents, the answers that are right, and what must be in the cache. Runs no model.

A suite is a request pack (`kvgraft.bench.packs`) or `builtin`. Of packs these keys count: `rid`, `parts`, `group`, `answers`;
of pairs `a`, `b`, `question`, `answer_a`, `answer_b`; of `{"input": ...}` lines `answers`, and `session_id`, or `dataset` and
`row`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.bench.fidelity.builtin import builtin_requests
from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.packs import find_pack, load_documents, read_records
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUILTIN = "builtin"
_ALIASES = {"adversarial": "adversarial.pairs"}
_VALUES = {"lines", "longeval"}
"""Suites with a value for an answer, right or wrong; answers of the others are scored by their words."""

_SAME_TEXT = 60
"""Equal first characters from which the texts of a pair are made of one text."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Requests of a pack in order of arrival; answers are scored by `metric`, `f1` or `value`."""

    name: str
    requests: tuple[FidelityRequest, ...]
    metric: str = "f1"


def load_suites(names: Sequence[str], data: str) -> list[Suite]:
    """Load every suite, by name from the folder `data`, or by the path of a pack.

    Raises:
        ConfigError: There is no such pack, it is malformed, or a suite is named twice.
    """
    suites = [load_suite(name, data) for name in names]
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("a suite is named twice; name each once")
    return suites


def has_suite(name: str, data: str) -> bool:
    """Return whether `load_suite` would find the suite."""
    return name == BUILTIN or find_pack(_path(name, data)) is not None


def load_suite(name: str, data: str) -> Suite:
    """Load one suite; see `load_suites`."""
    if name == BUILTIN:
        return Suite(BUILTIN, tuple(builtin_requests()))
    known = _ALIASES.get(name, name)
    found = find_pack(_path(name, data))
    if found is None:
        raise ConfigError(
            f"there is no pack {_path(name, data)} for the suite {name!r}; give --data DIR with the packs, the path of a "
            f"pack, or the suite {BUILTIN!r}, which every machine has"
        )
    path, kind = found
    title = Path(name).name
    if kind == "pairs":
        return Suite(title, tuple(_pairs(path)))
    if kind == "requests":
        return Suite(title, tuple(_requests(path, known)), "value" if title in _VALUES else "f1")
    return Suite(title, tuple(_prompts(path)))


def _path(name: str, data: str) -> str:
    """Return the path of the pack of a suite, without its ending."""
    known = _ALIASES.get(name, name)
    return known if "/" in name else str(Path(data) / known)


def _requests(path: Path, name: str) -> Iterator[FidelityRequest]:
    stem = Path(name).name
    docs_path = next((p for end in ("", ".gz") if (p := path.with_name(f"{stem}.docs.jsonl{end}")).is_file()), None)
    documents = {} if docs_path is None else load_documents(docs_path)
    for number, (line, record) in enumerate(read_records(path)):
        given = record.get("parts")
        if not isinstance(given, list):
            raise ConfigError(f'{line}: "parts" is missing or no list; every request needs it')
        group = str(record.get("group", number))
        parts = tuple(_part(part, documents, line) for part in given)
        answers = _answers(record, "answers", line) if "answers" in record else ()
        keys = tuple(dict.fromkeys(part.document for part in parts if part.document is not None))
        yield FidelityRequest(str(record.get("rid", number)), parts, keys or (group,), group, answers)


def _part(part: object, documents: dict[str, str], line: str) -> Part:
    if isinstance(part, dict) and isinstance(part.get("text"), str) and "doc" not in part:
        return Part(part["text"])
    if isinstance(part, dict) and "doc" in part and str(part["doc"]) in documents:
        return Part(documents[str(part["doc"])], str(part["doc"]))
    raise ConfigError(
        f'{line}: a part is neither {{"text": ...}} nor {{"doc": ...}} with a document of the pack; correct it'
    )


def _pairs(path: Path) -> Iterator[FidelityRequest]:
    """Yield both directions of every pair: one text has been read with the question, the other is asked."""
    for number, (line, record) in enumerate(read_records(path)):
        given = {key: _text(record, key, line) for key in ("a", "b", "question")}
        answers = {key: _answers(record, f"answer_{key}", line) for key in "ab"}
        same = given["a"][:_SAME_TEXT]
        for cached, asked in (("a", "b"), ("b", "a")):
            yield FidelityRequest(
                f"{record.get('pid', number)} {cached}->{asked}",
                (Part(given[asked], f"{same} {asked}"), Part(given["question"])),
                (same,),
                same,
                answers[asked],
                stale=answers[cached],
                donor=(given[cached], given["question"]),
            )


def _text(record: dict[str, object], key: str, line: str) -> str:
    text = record.get(key)
    if not isinstance(text, str):
        raise ConfigError(f'{line}: "{key}" is missing or no text; add it or correct the pack')
    return text


def _answers(record: dict[str, object], key: str, line: str) -> tuple[str, ...]:
    """Return right answers, given as a text, a list of texts, or a list of such lists."""
    found: list[str] = []
    waiting = [record.get(key)]
    while waiting:
        given = waiting.pop(0)
        if isinstance(given, str):
            found.append(given)
        elif isinstance(given, list):
            waiting[:0] = given
        else:
            raise ConfigError(f'{line}: "{key}" is neither a text nor a list of texts; correct the pack')
    return tuple(found)


def _prompts(path: Path) -> Iterator[FidelityRequest]:
    for number, (line, record) in enumerate(read_records(path)):
        text = _text(record, "input", line)
        group = _prompt_group(record, number)
        answers = _answers(record, "answers", line) if "answers" in record else ()
        yield FidelityRequest(str(number), (Part(text),), (group,), group, answers)


def _prompt_group(record: dict[str, object], number: int) -> str:
    """Return the group of a line: its session, the row of a data set that it was made of, else itself."""
    if "session_id" not in record and "dataset" in record and "row" in record:
        return f"{record['dataset']} {record['row']}"
    return str(record.get("session_id", number))
