"""A report file and a metrics URL as a source of the page: for vLLM, SGLang, and servers on other machines."""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.request
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError
from kvgraft.explain import RunKind, read_requests
from kvgraft.inspector.entries import Entry, EntryLog
from kvgraft.inspector.state import read_samples
from kvgraft.inspector.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client.samples import Sample

    from kvgraft.explain import ExplainedRequest

logger = logging.getLogger(__name__)

_MOST_BYTES = 8 << 20
"""Of the file, read at once."""
_MOST_METRICS = 8 << 20
_PATIENCE_S = 2.0


class FileSource:
    """Follows a report file as it grows, and asks a server for its metrics.

    A file that becomes shorter, or is replaced, is read from its beginning; a line that is being written waits for its end.

    Args:
        file: Reports, as `kvgraft explain` reads them, a line each; None where there are none.
        metrics_url: Of a Prometheus exposition; empty where there is none.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, file: Path | None, metrics_url: str = "") -> None:
        self.name = file.name if file is not None else metrics_url
        self.log = EntryLog()
        self.timeline = Timeline()
        self._file = file
        self.is_closing = False
        self._metrics_url = metrics_url
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._is_reported = False
        self._lock = asyncio.Lock()
        if file is not None:
            try:
                with file.open("rb"):
                    pass
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error

    async def refresh(self) -> None:
        """Take in lines that were written since the last time."""
        if self._file is not None:
            async with self._lock:
                await asyncio.to_thread(self._read_on, self._file)

    async def samples(self) -> list[Sample]:
        """What the URL answers; nothing while it does not."""
        if not self._metrics_url:
            return []
        try:
            return await asyncio.to_thread(lambda: read_samples(self._fetch()))
        except (OSError, ValueError, HTTPException) as error:
            if not self._is_reported:
                logger.warning("%s gives no metrics: %s", self._metrics_url, error)
            self._is_reported = True
            return []

    async def close(self, _grace_s: float) -> None:
        """End all streams of the page."""
        self.is_closing = True

    async def inspection(self) -> None:
        """There is no engine here to look into."""

    def _fetch(self) -> str:
        with urllib.request.urlopen(self._metrics_url, timeout=_PATIENCE_S) as answer:
            text: bytes = answer.read(_MOST_METRICS)
        self._is_reported = False
        return text.decode(errors="replace")

    def _read_on(self, file: Path) -> None:
        try:
            with file.open("rb") as source:
                status = file.stat()
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._offset:
                    self._identity, self._offset = identity, 0
                source.seek(self._offset)
                data = source.read(_MOST_BYTES)
        except OSError as error:
            logger.warning("%s cannot be read: %s", file, error.strerror or error)
            return
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _MOST_BYTES:
            end = len(data)  # no report has such a line
        self._offset += end
        for line in data[:end].splitlines():
            try:
                for request in read_requests(line.decode(errors="replace"), str(file)):
                    self.log.add(partial(_entry, request, time.time()))
            except ConfigError:
                continue  # no report, or of a later version


def _entry(request: ExplainedRequest, seen: float, number: int) -> Entry:
    miss = request.last.report["miss"]
    return Entry(
        number,
        seen,
        request.request_id,
        request.outcome,
        request.last.num_tokens,
        request.output_tokens,
        None,
        None,
        {kind: request.last.tokens(kind) for kind in RunKind},
        miss["reason"] if miss else "",
        lambda: request,
    )
