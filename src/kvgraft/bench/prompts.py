"""Read the user's own prompts, in order of arrival: a request pack, JSON lines with a prompt each, or lines of text.

For those who have none yet there is `builtin`, the suite that every machine has.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.bench.fidelity.builtin import builtin_requests
from kvgraft.bench.packs import PackSession, load_pack
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEYS = ("prompt", "text")
BUILTIN = "builtin"
"""Name of that suite."""


def read_sessions(name: str, limit: int | None = None) -> list[PackSession]:
    """Return the prompts at `name`; each session begins with an empty cache.

    Args:
        name: A pack (see `packs`), a file of lines: `{"prompt": s}`, `{"text": s}`, or text that is no JSON object; or
            `builtin`.
        limit: Most prompts that are asked in all; None for all of them. Prompts that a session finds cached do not count.

    Raises:
        ConfigError: A file is missing, empty or malformed; names file, line and remedy.
    """
    if name == BUILTIN:
        sessions = [PackSession((), tuple(request.prompt for request in builtin_requests()))]
    else:
        sessions = _line_sessions(Path(name)) or [s for workload in load_pack(name) for s in workload.sessions]
    return list(_limited(sessions, limit))


def _line_sessions(path: Path) -> list[PackSession]:
    """Return the prompts of a file of lines as one session; none where it is a pack, or no such file."""
    if not path.is_file() or path.name.endswith(".gz"):
        return []
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a UTF-8 text file") from error
    if not lines:
        raise ConfigError(f"{path}: the file is empty; it needs a prompt per line")
    first = _json_object(lines[0])
    if first is None:
        return [PackSession((), tuple(lines))]
    key = next((key for key in _KEYS if isinstance(first.get(key), str)), None)
    if key is None:
        return []
    prompts = []
    for number, line in enumerate(lines, 1):
        record = _json_object(line)
        text = None if record is None else record.get(key)
        if not isinstance(text, str):
            raise ConfigError(
                f'{path}: prompt {number} has no "{key}" with a text, as the first one has; correct the file'
            )
        prompts.append(text)
    return [PackSession((), tuple(prompts))]


def _json_object(line: str) -> dict[str, object] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _limited(sessions: list[PackSession], limit: int | None) -> Iterator[PackSession]:
    left = sum(len(session.requests) for session in sessions) if limit is None else limit
    for session in sessions:
        if left <= 0:
            return
        requests = tuple(itertools.islice(session.requests, left))
        left -= len(requests)
        yield PackSession(session.cached, requests)
