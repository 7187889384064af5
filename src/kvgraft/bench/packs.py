"""Read request packs: files of prompts in order of arrival. Tokenises and measures nothing.

A pack is one of
    `NAME.requests.jsonl`  `{"parts": [{"text": s} | {"doc": id}]}` per line, documents in `NAME.docs.jsonl` as
                           `{"doc": id, "text": s}`; the prompt is the parts joined by an empty line
    `NAME.jsonl`           `{"input": s}` per line
    `NAME.pairs.jsonl`     `{"a": s, "b": s, "question": s}` per line: near-duplicates, `question` optional
each possibly with `.gz`. `"t"` is the arrival in seconds, in every line of a pack or in none; other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PART_SEPARATOR = "\n\n"
_REQUESTS, _PAIRS, _PROMPTS = ".requests.jsonl", ".pairs.jsonl", ".jsonl"


@dataclass(frozen=True, slots=True)
class PackSession:
    """Prompts that share one cache.

    Attributes:
        cached: Prompts that are there before measuring begins.
        requests: Prompts in order of arrival.
        times: Their arrivals in seconds, or None where the pack has none.
    """

    cached: tuple[str, ...]
    requests: tuple[str, ...]
    times: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions that are reported together, each beginning with an empty cache."""

    name: str
    sessions: tuple[PackSession, ...]

    @property
    def num_prompts(self) -> int:
        """Prompts of all sessions, the cached ones included."""
        return sum(len(session.cached) + len(session.requests) for session in self.sessions)


def load_pack(prefix: str) -> list[Workload]:
    """Read the pack at a file's path, or at a path without the ending.

    Returns:
        One workload; for pairs two, one per direction: `a` cached and `b` asked, and the other way round.

    Raises:
        ConfigError: A file is missing, empty or malformed; names file, line and remedy.
    """
    path, ending = _locate(prefix)
    name = path.name.removesuffix(".gz").removesuffix(ending)
    if ending == _PAIRS:
        return _load_pairs(path, name + ".pairs")
    records = list(read_records(path))
    if ending == _REQUESTS:
        prompts = _request_prompts(records, path, name)
    else:
        prompts = [_text(record, "input", line) for line, record in records]
    return [Workload(name, (PackSession((), tuple(prompts), _times(records)),))]


def find_pack(prefix: str) -> tuple[Path, str] | None:
    """Return the main file of the pack at `prefix` and its kind (`requests`, `pairs` or `prompts`); None if there is none."""
    try:
        path, ending = _locate(prefix)
    except ConfigError:
        return None
    return path, {_REQUESTS: "requests", _PAIRS: "pairs"}.get(ending, "prompts")


def _locate(prefix: str) -> tuple[Path, str]:
    """Find the pack's main file, and its kind by the ending."""
    given = Path(prefix)
    if given.is_file():
        plain = given.name.removesuffix(".gz")
        return given, next((ending for ending in (_REQUESTS, _PAIRS) if plain.endswith(ending)), _PROMPTS)
    for ending in (_REQUESTS, _PAIRS, _PROMPTS):
        found = _with_ending(given, ending)
        if found is not None:
            # `adversarial.pairs` with the ending `.jsonl` is a pack of pairs.
            plain = found.name.removesuffix(".gz")
            return found, next((known for known in (_REQUESTS, _PAIRS) if plain.endswith(known)), ending)
    raise ConfigError(
        f"{prefix}: no request pack; give a file, or a path to which {_REQUESTS}, {_PAIRS} or {_PROMPTS} can be added"
    )


def _with_ending(prefix: Path, ending: str) -> Path | None:
    for name in (prefix.name + ending, prefix.name + ending + ".gz"):
        path = prefix.with_name(name) if prefix.name else prefix / name
        if path.is_file():
            return path
    return None


def _load_pairs(path: Path, name: str) -> list[Workload]:
    there, back = [], []
    for line, record in read_records(path):
        question = [_text(record, "question", line)] if "question" in record else []
        a, b = (_PART_SEPARATOR.join([_text(record, key, line), *question]) for key in "ab")
        there.append(PackSession((a,), (b,)))
        back.append(PackSession((b,), (a,)))
    return [Workload(f"{name} a->b", tuple(there)), Workload(f"{name} b->a", tuple(back))]


def _times(records: list[tuple[str, dict[str, object]]]) -> tuple[float, ...] | None:
    """Return the arrivals, or None where no record has one; a pack that has some only is refused."""
    if not any("t" in record for _, record in records):
        return None
    times = []
    for line, record in records:
        time = record.get("t")
        if not isinstance(time, int | float) or isinstance(time, bool):
            raise ConfigError(f'{line}: "t" is missing or no number, and other requests have it; give all or none')
        times.append(float(time))
    return tuple(times)


def _request_prompts(records: list[tuple[str, dict[str, object]]], path: Path, name: str) -> list[str]:
    docs_path = _with_ending(path.with_name(name), ".docs.jsonl")
    documents = {} if docs_path is None else load_documents(docs_path)
    docs_name = docs_path or path.with_name(name + ".docs.jsonl")

    def part_text(part: object, line: str) -> str:
        if not isinstance(part, dict) or ("text" in part) == ("doc" in part):
            raise ConfigError(f'{line}: a part is neither {{"text": ...}} nor {{"doc": ...}}; correct the pack')
        if "text" in part:
            return _text(part, "text", line)
        document = documents.get(_identifier(part, line))
        if document is None:
            raise ConfigError(f"{line}: document {part['doc']!r} is not in {docs_name}; add it or correct the id")
        return document

    return [_PART_SEPARATOR.join(_parts(record, line, part_text)) for line, record in records]


def _parts(record: dict[str, object], line: str, part_text: Callable[[object, str], str]) -> list[str]:
    parts = record.get("parts")
    if not isinstance(parts, list):
        raise ConfigError(f'{line}: "parts" is missing or no list; every request needs it')
    return [part_text(part, line) for part in parts]


def load_documents(path: Path) -> dict[str, str]:
    """Read the documents of a pack, by identifier; raises `ConfigError`."""
    documents: dict[str, str] = {}
    for line, record in read_records(path):
        identifier = _identifier(record, line)
        if identifier in documents:
            raise ConfigError(f"{line}: document {identifier!r} is given twice; remove one")
        documents[identifier] = _text(record, "text", line)
    return documents


def _identifier(record: dict[str, object], line: str) -> str:
    identifier = record.get("doc")
    if not isinstance(identifier, str | int):
        raise ConfigError(f'{line}: "doc" is missing or no identifier; add it')
    return str(identifier)


def _text(record: dict[str, object], key: str, line: str) -> str:
    text = record.get(key)
    if not isinstance(text, str):
        raise ConfigError(f'{line}: "{key}" is missing or no text; add it or correct the pack')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f'{line}: "{key}" has half characters (lone surrogates); correct the pack') from error
    return text


def read_records(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield `file:line` and the object of every line that is not blank; at least one."""
    is_empty = True
    for number, text in enumerate(read_lines(path), 1):
        if not text.strip():
            continue
        is_empty = False
        line = f"{path}:{number}"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{line}: not JSON ({error}); each line must be one object") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{line}: not a JSON object; each line must be one")
        yield line, record
    if is_empty:
        raise ConfigError(f"{path}: the file is empty; it needs one JSON object per line")


def read_lines(path: Path, newline: str = "\n") -> Iterator[str]:
    """Yield the lines of a UTF-8 file, possibly packed by gzip; `newline` as `open` takes it.

    Raises:
        ConfigError: The file cannot be read; names the remedy.
    """
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8", newline=newline) as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a UTF-8 text file, or one packed by gzip") from error
