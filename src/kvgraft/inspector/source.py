"""What the page shows, wherever it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvgraft.engine.inspection import Inspection
    from kvgraft.inspector.entries import EntryLog


class Source(Protocol):
    """A server, or what one left behind."""

    @property
    def name(self) -> str:
        """What is shown, for the page's title."""
        ...

    @property
    def log(self) -> EntryLog:
        """Requests that ended."""
        ...

    @property
    def is_closing(self) -> bool:
        """Whether streams should end, because nothing more will come."""
        ...

    async def refresh(self) -> None:
        """Take in what has come meanwhile."""
        ...

    async def metrics(self) -> str:
        """All metrics in the Prometheus format; empty where there are none to be had."""
        ...

    async def inspection(self) -> Inspection | None:
        """What lies in the engine; None where there is no engine to look into."""
        ...
