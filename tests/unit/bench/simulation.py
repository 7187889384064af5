"""Time that jumps to the next timer, and a server that takes exactly as long as it is told: load tests without waiting.

Nothing here looks at the machine's clock, so that what a test says of times holds on any machine, however busy.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvgraft.bench.client import TimedRequest, now

if TYPE_CHECKING:
    from collections.abc import Coroutine

Result = TypeVar("Result")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a timer it moves the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits and no timer is set: nothing would ever happen")
            self.seconds += max(0.0, timeout)
        return ready


class _SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0 and jumps; for tasks that wait for one another and for timers only."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.seconds


def run_in_simulated_time(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, in time that jumps."""
    with asyncio.Runner(loop_factory=_SimulatedLoop) as runner:
        return runner.run(work)


@dataclass
class SimulatedServer:
    """A client and the server behind it: one prompt at a time for `prefill_s`, then `tokens` tokens every `token_s`.

    It has the methods of `CompletionsClient` that a load test uses. `status` other than 200 fails every request. With
    `prefill_s_per_token` prompts take time by their length, and tokens are given only while no prompt is computed.
    """

    prefill_s: float = 0.001
    prefill_s_per_token: float = 0.0
    tokens: int | None = 3
    """Of every answer; None gives as many as were asked for."""

    token_s: float = 0.001
    status: int = 200
    models: tuple[dict[str, object], ...] = ({"id": "fake", "max_model_len": 1_000},)
    bodies: list[dict[str, object]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._machine = asyncio.Lock()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def get_json(self, _path: str) -> dict[str, Any]:
        return {"object": "list", "data": list(self.models)}

    async def text(self, body: bytes) -> str | None:
        exchange = TimedRequest(now())
        await self.stream(body, exchange)
        return None if exchange.failure else " a" * exchange.completion_tokens

    async def stream(self, body: bytes, exchange: TimedRequest) -> None:
        exchange.sent_s = now()
        fields = json.loads(body)
        self.bodies.append(fields)
        if self.status == 200:
            await self._answer(fields, exchange)
        else:
            exchange.failure = f"http {self.status}"
        exchange.ended_s = now()

    async def _answer(self, fields: dict[str, Any], exchange: TimedRequest) -> None:
        tokens = fields["max_tokens"] if self.tokens is None else self.tokens
        async with self._machine:
            await asyncio.sleep(self.prefill_s + self.prefill_s_per_token * len(fields["prompt"]))
        for _ in range(tokens):
            if self.prefill_s_per_token:
                async with self._machine:
                    pass
            exchange.token_s.append(now())
            await asyncio.sleep(self.token_s)
        exchange.prompt_tokens, exchange.completion_tokens, exchange.reused_tokens = 10, tokens, 4
