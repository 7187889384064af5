"""A file of what has been measured, a line per request, from which an interrupted run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Journal:
    """Records by suite and index of the request.

    The first line says with which arguments they were measured. A last line that is not whole was being written when the run
    was killed; it is measured again.

    Args:
        path: None to keep everything in memory.
        arguments: What decides about figures.

    Raises:
        ConfigError: The file was written with other arguments, is no journal, or cannot be written.
    """

    def __init__(self, path: Path | None, arguments: Mapping[str, Any]) -> None:
        self._path = path
        self._records: dict[tuple[str, int], dict[str, Any]] = {}
        self._head = json.dumps({"arguments": dict(arguments)})
        if path is None:
            return
        try:
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); give another file for --json") from error
        whole = lines[:-1]
        if whole:
            self._require_same(whole[0])
        self._write("\n".join(whole or [self._head]) + "\n", "w")
        for number, line in enumerate(whole[1:], 2):
            self._remember(_parsed(line, f"{path}:{number}"))

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; it has `suite` and `index`."""
        self._remember(record)
        if self._path is not None:
            self._write(json.dumps(record) + "\n", "a")

    def of_suite(self, suite: str) -> Iterator[dict[str, Any]]:
        """Records of a suite by index."""
        for key in sorted(key for key in self._records if key[0] == suite):
            yield self._records[key]

    def _remember(self, record: dict[str, Any]) -> None:
        self._records[record["suite"], record["index"]] = record

    def _require_same(self, line: str) -> None:
        known = _parsed(line, f"{self._path}:1").get("arguments")
        own = json.loads(self._head)["arguments"]
        if not isinstance(known, dict):
            raise ConfigError(f"{self._path} is no file of requests of this command; give another file for --json")
        if known != own:
            names = sorted(name for name in known.keys() | own.keys() if known.get(name) != own.get(name))
            raise ConfigError(
                f"{self._path} was measured with other arguments ({', '.join(names)}); give these again to go on, another "
                "file for --json, or remove it"
            )

    def _write(self, text: str, mode: str) -> None:
        assert self._path is not None
        try:
            with Path(self._path).open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error}); give another file for --json") from error


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); remove the file, or give another for --json") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is no object; remove the file, or give another for --json")
    return record
