"""Asks workers whether they are well, how busy they are, which adapters they serve, and how they render prompts."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from kvgraft.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.router.load import WorkerLoad
    from kvgraft.router.parity import Parity

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
PATIENCE_S = 10.0
"""How long a worker may take to say that it is well; one that computes on all processors is slow to."""
GONE_S = 30.0
"""Requests that hear nothing for so long from a worker that is down as long are given up: its host may have vanished."""
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)
_OK = 200


class Monitor:
    """Asks each worker once in a while, and at once when a request to it has failed."""

    def __init__(self, loads: Iterable[WorkerLoad], session: aiohttp.ClientSession, parity: Parity) -> None:
        self._loads = tuple(loads)
        self._session = session
        self._parity = parity
        self._unchecked: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._doubts: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        """Ask every worker once, then go on in the background."""
        await asyncio.gather(*(self._ask(load) for load in self._loads))
        for load in self._loads:
            self._doubts[load.spec.name] = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._watch(load)))

    def doubt(self, load: WorkerLoad, *, refused: bool) -> None:
        """Ask a worker now, as a request to it has failed. If it refused the connection, it is down."""
        if refused:
            self._down(load, "it refuses connections")
        doubts = self._doubts.get(load.spec.name)
        if doubts is not None:
            doubts.set()

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, load: WorkerLoad) -> None:
        doubts = self._doubts[load.spec.name]
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(doubts.wait(), INTERVAL_S)
            doubts.clear()
            try:
                await self._ask(load)
            except Exception:
                logger.exception("worker %s cannot be asked how it is; it is asked again", load.spec.name)

    async def _ask(self, load: WorkerLoad) -> None:
        try:
            await self._get(load, "/health")
        except _FAILURES as error:
            self._down(load, str(error) or type(error).__name__)
            load.give_up_silent(GONE_S)
            return
        if not load.is_up or not load.num_asked:
            await self._learn_models(load)
            self._unchecked.add(load.spec.name)
        await self._check_rendering(load)
        load.num_asked += 1
        if not load.is_up:
            logger.info("worker %s answers", load.spec.name)
        load.is_up = True
        await self._learn_load(load)

    async def _learn_load(self, load: WorkerLoad) -> None:
        before = load.num_in_flight
        try:
            metrics = await self._get(load, "/metrics")
            load.report(metrics, max(before, load.num_in_flight))
        except Exception as error:  # noqa: BLE001 - what a worker answers may be anything
            # Asked again in a second, and a server without metrics says so every time.
            logger.debug("metrics of worker %s are passed over: %s", load.spec.name, one_line(error))

    async def _check_rendering(self, load: WorkerLoad) -> None:
        """Ask a worker that has begun to answer how it renders prompts; again in a second, as long as it says nothing."""
        name = load.spec.name
        if name not in self._unchecked:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._parity.check(name, load.model, partial(self._post, load))
            self._unchecked.discard(name)
        except Exception as error:  # noqa: BLE001 - what a worker answers may be anything
            logger.debug("worker %s does not say how it renders prompts: %s", name, one_line(error))

    async def _learn_models(self, load: WorkerLoad) -> None:
        try:
            load.model, load.adapters = _models(await self._get(load, "/v1/models"))
        except Exception as error:  # noqa: BLE001 - what a worker answers may be anything
            logger.warning(
                "worker %s does not say which adapters it serves, they are learned from its events: %s",
                load.spec.name,
                one_line(error),
            )

    async def _get(self, load: WorkerLoad, path: str) -> str:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        url = load.spec.url + path
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
            if response.status != _OK:
                raise ValueError(f"{path} answers {response.status}")
            return await response.text(errors="replace")

    async def _post(self, load: WorkerLoad, path: str, body: dict[str, object]) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        url = load.spec.url + path
        async with self._session.post(url, json=body, timeout=timeout, allow_redirects=False) as response:
            return response.status, await response.text(errors="replace")

    def _down(self, load: WorkerLoad, reason: str) -> None:
        if load.is_up:
            logger.warning("worker %s is down: %s", load.spec.name, reason)
            load.down_since = time.monotonic()
        load.is_up = False
        load.report("")


def _models(answer: str) -> tuple[str, frozenset[str]]:
    """Return the name of the model, and of those that have a parent, as vLLM lists adapters."""
    models = json.loads(answer).get("data", [])
    names = [str(model["id"]) for model in models if not model.get("parent")]
    return names[0] if names else "", frozenset(str(model["id"]) for model in models if model.get("parent"))
