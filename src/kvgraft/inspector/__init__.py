"""The inspector: a page that shows requests, donors, prefixes and memory of a server while it works.

`kvgraft serve --ui` has it under `/ui/`; `kvgraft ui` shows the same of a report file and a metrics URL. It holds counts,
times and names of requests, never texts. Needs the extra `server`.
"""

from __future__ import annotations

from kvgraft.inspector.access import Access, key_digest
from kvgraft.inspector.app import create_inspector, inspector_server
from kvgraft.inspector.engine_source import EngineSource
from kvgraft.inspector.file_source import FileSource
from kvgraft.inspector.following import followed
from kvgraft.inspector.history import RequestHistory
from kvgraft.inspector.source import Source

__all__ = [
    "Access",
    "EngineSource",
    "FileSource",
    "RequestHistory",
    "Source",
    "create_inspector",
    "followed",
    "inspector_server",
    "key_digest",
]
