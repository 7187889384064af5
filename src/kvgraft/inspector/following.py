"""Look at a source every few seconds, so that its timeline has the last hour when the page is opened."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvgraft.inspector.state import state_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvgraft.inspector.source import Source

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Between two looks."""


@asynccontextmanager
async def followed(source: Source | None, period_s: float = PERIOD_S) -> AsyncGenerator[None]:
    """Add to `source.timeline` every `period_s` seconds, for as long as the context lasts; with None do nothing."""
    if source is None:
        yield
        return
    following = asyncio.create_task(_follow(source, period_s))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(source: Source, period_s: float) -> None:
    """Look until cancelled; a look that fails leaves a gap, and the log has the first of them."""
    is_reported = False
    while True:
        try:
            source.timeline.add(time.time(), state_of(await source.samples()))
        except Exception:
            if not is_reported:
                logger.exception("the page's curves have gaps: figures could not be read")
            is_reported = True
        await asyncio.sleep(period_s)
