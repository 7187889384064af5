"""Log lines of a server: as text for people or as JSON for collectors. Fields travel in `extra={"fields": {...}}`."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class TextFormatter(logging.Formatter):
    """`2026-11-21T09:30:00.123Z INFO kvgraft.server: message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and after it the traceback if there is one."""
        line = f"{_time(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}"
        line += "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object: time, level, logger, message, the record's fields, exception."""
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure_logging(log_format: str) -> None:
    """Send all logs of the process to stderr in `log_format` (`text` or `json`); libraries only from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("kvgraft").setLevel(logging.INFO)
    logging.captureWarnings(capture=True)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _word(value: object) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
