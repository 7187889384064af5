"""Another proxy that does the forwarding, with the worker in a header."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvgraft.config import quoted
from kvgraft.errors import ConfigError
from kvgraft.router.worker import require_url

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class Gateway:
    """Another proxy at `url` that forwards to the worker that a header names.

    `header` is such as `X-SMG-Target-Worker`; its value is the label of the chosen worker.
    """

    url: str
    header: str

    def __post_init__(self) -> None:
        require_url(self.url, "a gateway is a URL")
        if not _TOKEN.fullmatch(self.header):
            raise ConfigError(f"{quoted(self.header)} is no name of a header; give one such as X-SMG-Target-Worker")
