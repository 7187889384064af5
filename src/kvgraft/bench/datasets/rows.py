"""Rows of a local file in any of the formats in which data sets are published, and values in a row. Knows no data set."""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvgraft.bench.packs import read_lines, read_records
from kvgraft.errors import ConfigError

Row = Mapping[str, object]

_LONGEST_CELL = 1 << 30
"""Characters of a cell of CSV; the default limit of the standard library, 131,072, is shorter than a story."""
_ROWS_AT_ONCE = 256


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield `file:number` and the row, for every row of a file, which is read as it is needed (`.json` at once).

    `.jsonl`, `.json` (an array of objects, an object with one such array, or lines), `.csv` with a heading, `.txt` and `.raw`
    (each line a row with the field `text`), each possibly with `.gz`; `.parquet`.

    Raises:
        ConfigError: The file is missing, of another kind or malformed; names the remedy.
        ImportError: The file is `.parquet` and pyarrow is not installed.
    """
    ending = Path(path.name.removesuffix(".gz")).suffix
    reader = _READERS.get(ending)
    if reader is None:
        raise ConfigError(f"{path}: rows are read from {', '.join(_READERS)}; convert the file to one of these")
    return reader(path)


def value_at(row: object, path: str) -> object:
    """Return what lies at a path of names joined by dots; None if there is nothing.

    A list on the way stands for all its items: `turns.question` is the list of the questions of all turns. A text on the way
    is read as JSON or as a literal of Python, in which some data sets keep lists.
    """
    found = row
    for name in path.split("."):
        found = _step(found, name)
    return found


def field_of(row: Row, paths: Sequence[str], name: str, line: str) -> object:
    """Return what lies at the first of `paths` at which there is a text.

    Returns:
        Something without a text where there is only that.

    Raises:
        ConfigError: Nothing lies at any of them; names the option that gives another path.
    """
    found = [value for path in paths if (value := value_at(row, path)) is not None]
    if not found:
        raise ConfigError(
            f"{line}: there is nothing at {' or '.join(paths)}; the row has {', '.join(map(str, row))}; give --{name} PATH"
        )
    return next((value for value in found if texts_of(value)), found[0])


def texts_of(value: object) -> list[str]:
    """Return the texts in a value: itself, a number as it is written, or those of a list, however deep.

    Blank ones are left out, and half characters (lone surrogates), which no pack may have, are replaced.
    """
    if isinstance(value, list):
        return [text for each in value for text in texts_of(each)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [str(value)]
    text = value.strip() if isinstance(value, str) else ""
    return [text.encode("utf-8", "replace").decode()] if text else []


def _step(found: object, name: str) -> object:
    if isinstance(found, str):
        found = _literal(found)
    if isinstance(found, list):
        return [_step(each, name) for each in found]
    return found.get(name) if isinstance(found, Mapping) else None


def _literal(text: str) -> object:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _lines(path: Path) -> Iterator[str]:
    return read_lines(path, newline="")  # as they end: CSV has ends of lines within cells


def _text_rows(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(_lines(path), 1):
        yield f"{path}:{number}", {"text": line.rstrip("\r\n")}


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.DictReader(_lines(path))
    try:
        for row in rows:
            yield f"{path}:{rows.line_num}", row
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: not CSV ({error}); correct the file") from error


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        found = json.loads("".join(_lines(path)))
    except (ValueError, RecursionError):
        yield from read_records(path)  # an object per line, under the other name
        return
    for number, row in enumerate(_array(found, path), 1):
        yield f"{path}: object {number}", row


def _array(found: object, path: Path) -> list[Row]:
    """Return the array of objects that a document of JSON is, or that it has under one of its names."""
    candidates = [found, *found.values()] if isinstance(found, dict) else [found]
    arrays = [
        each for each in candidates if isinstance(each, list) and each and all(isinstance(row, dict) for row in each)
    ]
    if len(arrays) == 1:
        return list(arrays[0])
    if isinstance(found, dict) and not arrays:
        return [found]
    raise ConfigError(f"{path}: neither an array of objects nor an object with one; extract the array of rows")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise ImportError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow, or give .jsonl") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet ({error}); give the file as it was published") from error


_READERS = {
    ".jsonl": read_records,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".txt": _text_rows,
    ".raw": _text_rows,
}
