"""The engine of this process as a source of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import OverloadedError
from kvgraft.inspector.state import NAMES
from kvgraft.inspector.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client.samples import Sample

    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.engine.inspection import Inspection
    from kvgraft.inspector.entries import EntryLog
    from kvgraft.inspector.history import RequestHistory


class EngineSource:
    """An engine, its history and its metrics.

    Args:
        name: Of the model.
        engine: Is asked between steps, only while the page is open.
        history: Requests that the engine recorded.
        samples: Gives the metrics with these names as of now.
        is_closing: Says whether the server is being stopped.

    Attributes:
        timeline: Figures of the last hour.
    """

    def __init__(
        self,
        name: str,
        engine: AsyncLLM,
        history: RequestHistory,
        samples: Callable[[Sequence[str]], list[Sample]],
        is_closing: Callable[[], bool],
    ) -> None:
        self.name = name
        self.timeline = Timeline()
        self._engine = engine
        self._history = history
        self._samples = samples
        self._is_closing = is_closing

    @property
    def log(self) -> EntryLog:
        """Requests that ended."""
        return self._history.log

    @property
    def is_closing(self) -> bool:
        """Whether the server is being stopped."""
        return self._is_closing()

    async def refresh(self) -> None:
        """Do nothing: the engine records by itself."""

    async def samples(self) -> list[Sample]:
        """Metrics as of now; the others, with their buckets, are not collected."""
        return self._samples(NAMES)

    async def inspection(self) -> Inspection | None:
        """What lies in the engine; None if its thread has ended."""
        try:
            return await self._engine.inspect()
        except OverloadedError:
            return None
