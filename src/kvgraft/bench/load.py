"""Send requests at their times, earlier ones answered or not (open loop), or as fast as they are answered (closed loop).

An open loop stops when the server falls behind for good.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.bench.client import GONE, TimedRequest, now

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Send = Callable[[bytes, TimedRequest], Awaitable[None]]

_CHECK_SECONDS = 0.1
_LEAD_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Requests of a run, and how it ended.

    Attributes:
        exchanges: One per request that was sent, in order of its time.
        planned: Requests that were to be sent.
        seconds: From the first arrival until the last request ended.
        gave_up: Why the run was ended early, or None.
    """

    exchanges: tuple[TimedRequest, ...]
    planned: int
    seconds: float
    gave_up: str | None


async def run_open_loop(
    send: Send,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    *,
    give_up_s: float,
    advance: Callable[[], object] = lambda: None,
) -> LoadResult:
    """Send `bodies` at `arrivals` and wait for all; takes at most the last arrival + 2 `give_up_s`.

    The run ends early as soon as one request has waited `give_up_s` for its first token: the queue is longer than
    clients would wait. Requests that are still running when it ends are cancelled and stay in the result without an end.

    Args:
        send: Sends a body and notes times and figures in the exchange; raises nothing.
        bodies: Requests.
        arrivals: Ascending seconds, one per body.
        give_up_s: Longest wait for a first token.
        advance: Called when a request has ended.
    """
    loop = _OpenLoop(send, give_up_s, advance)
    try:
        await loop.send_all(bodies, arrivals)
        await loop.wait_for_rest()
        gave_up = None
    except _FellBehindError as error:
        gave_up = str(error)
    finally:
        await loop.cancel()
    return LoadResult(tuple(loop.exchanges), len(bodies), loop.seconds(), gave_up)


class _FellBehindError(Exception):
    """The server does not keep up; says how that showed."""


class _OpenLoop:
    """One run: the requests that are running, and when to end it."""

    def __init__(self, send: Send, give_up_s: float, advance: Callable[[], object]) -> None:
        self.exchanges: list[TimedRequest] = []
        self.start = now() + _LEAD_SECONDS
        self._send = send
        self._give_up_s = give_up_s
        self._advance = advance
        self._running: dict[asyncio.Task[None], TimedRequest] = {}

    def seconds(self) -> float:
        """From the first arrival until the last request ended, or until now where one has not."""
        ends = [exchange.ended_s for exchange in self.exchanges if exchange.ended_s is not None]
        return (max(ends) if len(ends) == len(self.exchanges) else now()) - self.start

    async def send_all(self, bodies: Sequence[bytes], arrivals: Sequence[float]) -> None:
        """Send every request at its time."""
        for body, arrival in zip(bodies, arrivals, strict=True):
            moment = self.start + arrival
            while (left := moment - now()) > 0:
                await self._pause(left)
            exchange = TimedRequest(moment)
            self.exchanges.append(exchange)
            task = asyncio.ensure_future(self._send(body, exchange))
            self._running[task] = exchange
            task.add_done_callback(self._ended)
            self._check_waits()

    async def wait_for_rest(self) -> None:
        """Wait until every request has ended."""
        limit = 2 * self._give_up_s
        deadline = now() + limit
        while self._running:
            left = deadline - now()
            if left <= 0:
                raise _FellBehindError(f"{len(self._running)} requests ran on {limit:g} s after the last arrival")
            await self._pause(left)

    async def cancel(self) -> None:
        """Cancel what is still running."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self, longest: float) -> None:
        """Sleep for a moment and see whether a request has waited for too long."""
        await asyncio.sleep(min(longest, _CHECK_SECONDS))
        self._check_waits()

    def _check_waits(self) -> None:
        oldest = now() - self._give_up_s
        if any(not exchange.token_s and exchange.scheduled_s < oldest for exchange in self._running.values()):
            raise _FellBehindError(f"a request waited {self._give_up_s:g} s for its first token")

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._advance()


async def run_closed_loop(
    send: Send, bodies: Sequence[bytes], clients: int, advance: Callable[[], object] = lambda: None
) -> list[TimedRequest]:
    """Send `bodies` in order from `clients` clients, each with one request at a time; all stop when the server is gone."""
    exchanges: list[TimedRequest] = []
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:
            exchange = TimedRequest(now())
            exchanges.append(exchange)
            await send(body, exchange)
            advance()
            if exchange.failure in GONE:
                break

    await asyncio.gather(*(client() for _ in range(clients)))
    return exchanges
