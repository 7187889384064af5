"""A file of what has been measured, a line per request or round, from which an interrupted run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Journal:
    """Records by the fields that name them.

    The first line says with which arguments they were measured. A last line that is not whole was being written when the run
    was killed; it is measured again.

    Args:
        path: None to keep everything in memory.
        arguments: What decides about figures.
        key: Fields of every record that together are in no other, the coarsest first.

    Raises:
        ConfigError: The file was written with other arguments, is no journal, or cannot be written.
    """

    def __init__(
        self, path: Path | None, arguments: Mapping[str, Any], key: Sequence[str] = ("suite", "index")
    ) -> None:
        self._path = path
        self._key = tuple(key)
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._head = json.dumps({"arguments": dict(arguments)})
        if path is None:
            return
        try:
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); give another file") from error
        whole = lines[:-1]
        if whole:
            self._require_same(whole[0])
        self._write("\n".join(whole or [self._head]) + "\n", "w")
        for number, line in enumerate(whole[1:], 2):
            self._remember(_parsed(line, f"{path}:{number}"))

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, *key: object) -> dict[str, Any] | None:
        """Return the record of that key; None if there is none yet."""
        return self._records.get(key)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; it has every field of the key."""
        self._remember(record)
        if self._path is not None:
            self._write(json.dumps(record) + "\n", "a")

    def under(self, *beginning: object) -> Iterator[dict[str, Any]]:
        """Yield records by the beginning of their key, all for no `beginning`, in the order of their keys."""
        for key in sorted(key for key in self._records if key[: len(beginning)] == beginning):
            yield self._records[key]

    def _remember(self, record: dict[str, Any]) -> None:
        self._records[tuple(record[name] for name in self._key)] = record

    def _require_same(self, line: str) -> None:
        known = _parsed(line, f"{self._path}:1").get("arguments")
        own = json.loads(self._head)["arguments"]
        if not isinstance(known, dict):
            raise ConfigError(f"{self._path} is no file of requests of this command; give another file")
        if known != own:
            names = sorted(name for name in known.keys() | own.keys() if known.get(name) != own.get(name))
            raise ConfigError(
                f"{self._path} was measured with other arguments ({', '.join(names)}); give these again to go on, another "
                "file, or remove it"
            )

    def _write(self, text: str, mode: str) -> None:
        assert self._path is not None
        try:
            with Path(self._path).open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error}); give another file") from error


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); remove the file, or give another") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is no object; remove the file, or give another")
    return record
