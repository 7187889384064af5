"""A client of the completions API that keeps the times and figures of every request. Imports neither torch nor the engine.

`aiohttp` is used because its parser is written in C: a streamed chunk costs 32 microseconds of client time, 82 with httpx,
and the client often shares its cores with the server under test.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from kvgraft.bench.sse import EventParser
from kvgraft.errors import ConfigError

try:
    import aiohttp
except ModuleNotFoundError as missing:
    raise ImportError(f"the load client needs {missing.name}: pip install 'kvgraft[bench]'") from missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

DONE = "[DONE]"
"""Data of the event that ends a stream."""

GONE = frozenset({"timeout", "no connection"})
"""Failures after which there is no use in sending more."""

_READ_SECONDS = 120.0
"""Silence of a server after which a request has failed."""


def now() -> float:
    """Return seconds of the running event loop's clock, which is monotonic."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class TimedRequest:
    """Times and figures of one request so far; seconds are of `now`.

    Attributes:
        scheduled_s: When it was to be sent.
        sent_s: When it was sent, or None.
        token_s: When each chunk with text arrived.
        ended_s: When it ended, well or not, or None.
        failure: Kind of failure, such as `http 400`, or None.
        prompt_tokens: Of the usage.
        completion_tokens: Of the usage; where the server gave none, chunks with text.
        reused_tokens: Prompt tokens that were not computed, of the report, else `cached_tokens` of the usage, else None.
    """

    scheduled_s: float
    sent_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    failure: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it ended as it should."""
        return self.ended_s is not None and self.failure is None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the scheduled time to the first token."""
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first."""
        if not self.succeeded or self.completion_tokens < 2 or len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.completion_tokens - 1)

    @property
    def end_to_end_s(self) -> float | None:
        """Seconds from the scheduled time to the end, of a request that succeeded."""
        return self.ended_s - self.scheduled_s if self.ended_s is not None and self.succeeded else None


class CompletionsClient:
    """Connections to one server; use it as an async context manager. Opens as many connections as there are requests."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_READ_SECONDS),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get_json(self, path: str) -> dict[str, Any]:
        """Read a JSON object; raises `ConfigError` if the server cannot be reached or gives something else."""
        try:
            async with self._session.get(self._url + path) as response:
                value = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ConfigError(f"{self._url}{path}: {_one_line(error)}; is a server running there?") from error
        if response.status != 200 or not isinstance(value, dict):
            raise ConfigError(
                f"{self._url}{path}: status {response.status}; give the address of an OpenAI-compatible server"
            )
        return value

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Send a completion that is not streamed; returns status and content. Errors of the connection are raised."""
        async with self._session.post(self._url + "/v1/completions", data=body) as response:
            return response.status, await response.read()

    async def text(self, body: bytes) -> str | None:
        """Send a streamed completion and return its text, None where it failed."""
        parts: list[str] = []
        try:
            async for data in self.events(body):
                event = {} if data == DONE else json.loads(data)
                if "error" in event:
                    return None
                parts += (choice.get("text") or "" for choice in event.get("choices") or ())
        except (
            HTTPStatusError,
            aiohttp.ClientError,
            OSError,
            TimeoutError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ):
            return None
        return "".join(parts)

    async def events(self, body: bytes) -> AsyncIterator[str]:
        """Send a streamed completion and yield the data of its events; leaving early closes the connection.

        Raises:
            HTTPStatusError: The server refused the request.
            aiohttp.ClientError: The connection broke.
        """
        async with self._session.post(self._url + "/v1/completions", data=body) as response:
            if response.status != 200:
                raise HTTPStatusError(response.status, (await response.read()).decode("utf-8", "replace"))
            parser = EventParser()
            async for chunk in response.content.iter_any():
                for data in parser.feed(chunk):
                    yield data

    async def stream(self, body: bytes, exchange: TimedRequest) -> None:
        """Send a streamed completion and note its times and figures in `exchange`.

        Raises nothing but `CancelledError`; a cancelled exchange has no end.
        """
        exchange.sent_s = now()
        try:
            await self._read_stream(body, exchange)
        except HTTPStatusError as error:
            exchange.failure = f"http {error.status}"
        except TimeoutError:
            exchange.failure = "timeout"
        except aiohttp.ClientConnectorError:
            exchange.failure = "no connection"
        except (aiohttp.ClientError, OSError):
            exchange.failure = "disconnected"
        except (ValueError, TypeError, LookupError, AttributeError):
            exchange.failure = "malformed event"
        exchange.ended_s = now()

    async def _read_stream(self, body: bytes, exchange: TimedRequest) -> None:
        is_whole = False
        async for data in self.events(body):
            if data == DONE:
                is_whole = True
                continue
            event = json.loads(data)
            if "error" in event:
                exchange.failure = "error in stream"
            if has_text(event):
                exchange.token_s.append(now())
            note_usage(event, exchange)
        exchange.completion_tokens = exchange.completion_tokens or len(exchange.token_s)
        if exchange.failure is None and not is_whole:
            exchange.failure = "stream cut short"


class HTTPStatusError(Exception):
    """A status other than 200, with what the server said."""

    def __init__(self, status: int, content: str) -> None:
        super().__init__(f"{status}: {content[:200]}")
        self.status = status


def completion_body(
    prompt: str | Sequence[int],
    *,
    model: str,
    max_tokens: int,
    reuse: str | None = None,
    cache_salt: str | None = None,
    stream: bool = True,
    others: Mapping[str, object] | None = None,
) -> bytes:
    """Encode a greedy completion of exactly `max_tokens` tokens; `others` are added or replace what is there."""
    fields: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if reuse is not None:
        fields["kvgraft"] = {"reuse": reuse}
    if cache_salt is not None:
        fields["cache_salt"] = cache_salt
    return json.dumps(fields | dict(others or {})).encode()


def has_text(event: Mapping[str, Any]) -> bool:
    """Return whether a chunk carries output."""
    return any(choice.get("text") for choice in event.get("choices") or ())


def note_usage(event: Mapping[str, Any], exchange: TimedRequest) -> None:
    """Take token counts out of a chunk or a whole response, as far as it has them."""
    usage = event.get("usage")
    if usage:
        exchange.prompt_tokens = int(usage["prompt_tokens"])
        exchange.completion_tokens = int(usage["completion_tokens"])
        if exchange.reused_tokens is None:
            exchange.reused_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    report = event.get("kvgraft")
    if report:
        exchange.prompt_tokens = int(report["num_tokens"])
        exchange.reused_tokens = sum(
            int(report.get(f"{kind}_tokens", 0)) for kind in ("exact", "continued", "shifted", "substituted")
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
