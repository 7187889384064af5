"""Work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvgraft.http.errors import ClientDisconnectedError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work` and return its result; cancels it if the client leaves first.

    Raises:
        ClientDisconnectedError: The client left.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
