"""Sources of what the page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.samples import Sample

    from kvgraft.engine.inspection import Inspection
    from kvgraft.inspector.entries import EntryLog
    from kvgraft.inspector.timeline import Timeline


class Source(Protocol):
    """A server, or the files that one left."""

    @property
    def name(self) -> str:
        """What is shown, for the page's title."""
        ...

    @property
    def log(self) -> EntryLog:
        """Requests that ended."""
        ...

    @property
    def timeline(self) -> Timeline:
        """Figures of the last hour, where the source is followed (`following.followed`)."""
        ...

    @property
    def is_closing(self) -> bool:
        """Whether streams should end, because nothing more will come."""
        ...

    async def refresh(self) -> None:
        """Take in what has come meanwhile."""
        ...

    async def samples(self) -> Sequence[Sample]:
        """Samples of the metrics `state.NAMES` as of now, of those that are there."""
        ...

    async def inspection(self) -> Inspection | None:
        """What lies in the engine; None where there is no engine to look into."""
        ...
