"""A server as the healer uses it: its kind, its load, and a prompt of token ids that grafts nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import aiohttp

from kvgraft.errors import ConfigError, IntegrationError, one_line
from kvgraft.reuse.asked import PARAMETER
from kvgraft.router.load import reported_load
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)
_PATIENCE = aiohttp.ClientTimeout(total=30.0, sock_connect=5.0)
"""One that computes on all processors is slow to say that it is well."""
_PREFILL = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_OK, _UNAUTHORIZED, _NOT_FOUND = 200, (401, 403), 404
_REFUSED = (400, 413, 422)
"""Refusals of the prompt. Anything else is wrong with the server, the key or the way there, and may be mended."""


class ServerError(IntegrationError):
    """A server did not answer, or answered what cannot be understood; later it may."""


class RefusedError(IntegrationError):
    """A server does not take a prompt, and will not take it later."""


class Kind(StrEnum):
    """Kinds of servers, by their own account."""

    VLLM = "vllm"
    SGLANG = "sglang"
    KVGRAFT = "kvgraft"


@dataclass(frozen=True, slots=True)
class About:
    """A server's account of itself: its engine, and the name of its model."""

    kind: Kind
    model: str


class Server:
    """One server over HTTP. Lives on the event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str = "",
        priority: int | None = None,
    ) -> None:
        """Keep the address; nothing is asked yet.

        Args:
            session: Of the event loop.
            url: Without `/v1`.
            api_key: Sent as a bearer token; empty for none.
            priority: Of every prompt, for servers that schedule by priority; others refuse it.

        Raises:
            ConfigError: The key cannot stand in a header.
        """
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the API key has a line break or another character that no header carries; "
                "mend --api-key or OPENAI_API_KEY"
            )
        self.url = url
        self._session = session
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._priority = priority
        self._about: About | None = None

    async def describe(self) -> About:
        """Ask for its kind and model.

        Raises:
            ConfigError: It is none of those that can be healed, or wants a key.
            ServerError: It does not answer.
        """
        try:
            status, text = await self._get("/v1/models")
        except _FAILURES as error:
            raise ServerError(
                f"{self.url} does not answer: {_reason(error)}; start the server, or check --url"
            ) from error
        if status in _UNAUTHORIZED:
            raise ConfigError(f"{self.url} wants a key; give it with --api-key or in OPENAI_API_KEY")
        self._about = _about(self.url, status, text)
        return self._about

    async def num_requests(self) -> int:
        """Return the requests that run or wait there, by its own count, ours among them. May be cancelled at any time.

        Raises:
            ServerError: It does not say.
        """
        is_sglang = (await self._learned()).kind is Kind.SGLANG
        try:
            # SGLang counts live here, with and without --enable-metrics.
            status, text = await self._get("/v1/loads?include=core" if is_sglang else "/metrics")
            if is_sglang and status == _NOT_FOUND:
                status, text = await self._get("/metrics")
        except _FAILURES as error:
            self._about = None
            raise ServerError(f"{self.url} does not answer: {_reason(error)}") from error
        found = _load(text) if status == _OK else None
        if found is None:
            self._about = None
            remedy = "start it with --enable-metrics" if is_sglang else "start it without --disable-log-stats"
            raise ServerError(f"{self.url}/metrics does not say how many requests run; {remedy}")
        return found

    async def compute(self, token_ids: Sequence[int]) -> None:
        """Have a text computed as a prompt of its own that grafts nothing; returns when it is. May be cancelled at any time.

        Raises:
            RefusedError: The server does not take it.
            ServerError: It failed.
        """
        about = await self._learned()
        path, body = _prompt(about, list(token_ids))
        if self._priority is not None:
            body["priority"] = self._priority
        try:
            async with self._session.post(
                self.url + path,
                json=body,
                headers=self._headers,
                timeout=_PREFILL,
                allow_redirects=False,
            ) as response:
                status, text = await _read(response)
        except _FAILURES as error:
            self._about = None
            raise ServerError(f"{self.url} broke off: {_reason(error)}") from error
        if status == _OK:
            return
        answered = f"{self.url}{path} answers {status}: {' '.join(text.split())[:300]}"
        if status in _REFUSED:
            raise RefusedError(answered)
        self._about = None
        raise ServerError(answered)

    async def _learned(self) -> About:
        """Return its kind and model; asked anew after an error, for another server may have taken its place.

        Raises:
            ServerError: It does not say, or cannot be healed any more.
        """
        try:
            about = self._about or await self.describe()
        except ConfigError as error:
            raise ServerError(str(error)) from error
        if about.kind is Kind.KVGRAFT:
            self._about = None
            raise ServerError(f"{self.url} is kvgraft serve by now, which heals itself")
        return about

    async def _get(self, path: str) -> tuple[int, str]:
        async with self._session.get(
            self.url + path, headers=self._headers, timeout=_PATIENCE, allow_redirects=False
        ) as response:
            return await _read(response)


async def _read(response: aiohttp.ClientResponse) -> tuple[int, str]:
    """Return status and text; as UTF-8, for a header may name no encoding of text."""
    return response.status, (await response.read()).decode(errors="replace")


def _about(url: str, status: int, text: str) -> About:
    """Read a list of models; adapters, which have a parent, are not what is healed."""
    try:
        models = json.loads(text)["data"] if status == _OK else []
        base = next(model for model in models if not model.get("parent"))
        return About(Kind(base["owned_by"]), str(base["id"]))
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        raise ConfigError(
            f"{url}/v1/models does not list a model of vLLM, SGLang or kvgraft; give the URL of such a server, without /v1"
        ) from None


def _prompt(about: About, token_ids: list[int]) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request that grafts nothing and leaves a donor; reuse `off` would leave none."""
    asked = {PARAMETER: ReuseMode.EXACT.value}
    if about.kind is Kind.SGLANG:
        # Its own API takes token ids without a tokenizer, too.
        sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": asked}
        return "/generate", {"input_ids": token_ids, "sampling_params": sampling}
    body = {"model": about.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, "kv_transfer_params": asked}
    return "/v1/completions", body


def _load(text: str) -> int | None:
    """Return the requests that a server reports; None where it reports none, or infinitely many."""
    try:
        return _sglang_load(text) if text.lstrip().startswith("{") else reported_load(text)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _sglang_load(text: str) -> int:
    loads = json.loads(text)["loads"]
    return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)


def _reason(error: BaseException) -> str:
    return one_line(error) if str(error) else type(error).__name__
