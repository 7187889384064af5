"""Sessions over HTTP, from the bytes of a request to the model: what is sent, what is computed, what others get."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.server.conftest import exchange

from kvgraft.config import ServerConfig
from kvgraft.engine.async_llm import AsyncLLM
from kvgraft.server import create_app

KEYS = ("first-key", "second-key")
TEXT = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    sides = 6\n" * 4


class Site:
    """The app over graft-tiny in this process, and what clients send to it."""

    def __init__(self, **settings):
        config = ServerConfig(num_slots=4000, api_key=KEYS).updated(settings)
        self.llm = AsyncLLM(config.model, config)
        self.app = create_app(self.llm, config)

    async def send(self, method, path, value=None, *, key=KEYS[0], **options):
        headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
        return await exchange(self.app, method, path, headers=headers, body=[json.dumps(value).encode()], **options)

    async def complete(self, prompt, session_id="s", **fields):
        key = fields.pop("key", KEYS[0])
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "kvgraft": {"reuse": "exact"}}
        named = {} if session_id is None else {"session_id": session_id}
        return await self.send("POST", "/v1/completions", body | named | fields, key=key)

    async def kept_slots(self):
        return (await self.send("GET", "/health")).json["sessions"]["kept_slots"]


@pytest.fixture
def run():
    """Run a coroutine function with a site, which is closed afterwards."""

    def run_with(test, **settings):
        async def whole():
            site = Site(**settings)
            try:
                await test(site)
                await site.llm.check()
            finally:
                await site.llm.close()

        asyncio.run(whole())

    return run_with


def cached(reply):
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_completions_send_what_is_new(run):
    async def test(site):
        session = (await site.send("POST", "/v1/sessions", {})).json["id"]
        first = (await site.complete(TEXT, session)).json["usage"]
        second = await site.complete("\n\n# more", session)
        assert second.json["usage"]["prompt_tokens"] > first["total_tokens"]
        assert cached(second) == first["total_tokens"] - 1
        assert second.json["kvgraft"]["exact_tokens"] == cached(second)
        assert (await site.send("GET", "/health")).json["sessions"]["open"] == 1
        assert await site.kept_slots() == second.json["usage"]["total_tokens"] - 1
        assert (await site.send("DELETE", f"/v1/sessions/{session}")).status == 200
        gone = await site.complete("\n", session)
        assert (gone.status, gone.error["code"]) == (404, "session_not_found")

    run(test)


def test_the_answer_is_that_of_the_whole_text(run):
    async def test(site):
        ids = (await site.send("POST", "/tokenize", {"prompt": TEXT})).json["tokens"]
        await site.send("POST", "/v1/sessions", {"id": "s"})
        first = await site.complete(ids[:100], logprobs=0)
        second = await site.complete(ids[100:])
        held = site.llm._engine.sessions._open
        (session,) = held.values()
        whole = session.token_ids[:-6].tolist()
        assert (whole[:100], whole[106:]) == (ids[:100], ids[100:])
        cold = await site.complete(whole, None, kvgraft={"reuse": "off"})
        assert second.json["choices"][0]["text"] == cold.json["choices"][0]["text"]
        assert first.json["usage"]["prompt_tokens"] == 100

    run(test)


def test_streams_are_turns_too(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        streamed = await site.complete(TEXT, stream=True)
        assert streamed.events[-1] == "[DONE]"
        first = streamed.events[-2]["kvgraft"]["num_tokens"]
        assert cached(await site.complete("x")) == first + 5

    run(test)


def test_chats_send_all_of_it(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        body = {"session_id": "s", "max_tokens": 6, "temperature": 0, "kvgraft": {"reuse": "exact"}}
        messages = [{"role": "user", "content": TEXT}]
        first = await site.send("POST", "/v1/chat/completions", body | {"messages": messages})
        messages += [first.json["choices"][0]["message"], {"role": "user", "content": "more"}]
        second = await site.send("POST", "/v1/chat/completions", body | {"messages": messages})
        assert cached(second) >= first.json["usage"]["prompt_tokens"] - 1
        assert await site.kept_slots() == second.json["usage"]["total_tokens"] - 1
        edited = [{"role": "user", "content": "other " + TEXT}]
        third = await site.send("POST", "/v1/chat/completions", body | {"messages": edited})
        assert cached(third) < 10
        assert await site.kept_slots() == third.json["usage"]["total_tokens"] - 1

    run(test)


def test_two_turns_at_once_are_a_409(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        turn = asyncio.create_task(site.complete(TEXT, max_tokens=300))
        while not (await site.send("GET", "/health")).json["requests"]["running"]:
            await asyncio.sleep(0.01)
        for stream in (True, False):
            reply = await site.complete("x", stream=stream)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (409, "session_in_use", "session_id")
        assert (await turn).json["usage"]["completion_tokens"] == 300
        assert cached(await site.complete("y")) > 300

    run(test)


def test_a_session_is_of_its_key_and_salt(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        await site.complete(TEXT)
        for fields in ({"key": KEYS[1]}, {"key": KEYS[1], "cache_salt": "guess"}, {"cache_salt": "guess"}):
            assert (await site.complete("x", **fields)).status == 404
        assert (await site.send("DELETE", "/v1/sessions/s", key=KEYS[1])).status == 404
        assert (await site.send("DELETE", "/v1/sessions/s?cache_salt=guess")).status == 404
        assert (await site.send("POST", "/v1/sessions", {"id": "s"})).status == 409
        assert (await site.send("POST", "/v1/sessions", {"id": "s"}, key=KEYS[1])).status == 200
        assert (await site.complete("x", key=KEYS[1])).json["usage"]["prompt_tokens"] < 5
        assert (await site.send("DELETE", "/v1/sessions/s")).status == 200
        assert (await site.send("DELETE", "/v1/sessions/s", key=KEYS[1])).status == 200

    run(test)


def test_a_reset_closes_sessions(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        await site.complete(TEXT)
        await site.send("POST", "/reset_prefix_cache")
        assert (await site.complete("x")).status == 404
        assert await site.kept_slots() == 0

    run(test)


def test_there_is_a_limit(run):
    async def test(site):
        statuses = [(await site.send("POST", "/v1/sessions", {})).status for _ in range(3)]
        assert statuses == [200, 200, 429]

    run(test, max_sessions=2)


def test_a_turn_that_is_too_long_is_refused(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        first = (await site.complete(TEXT)).json["usage"]
        reply = await site.complete([5] * 3990)
        assert (reply.status, "shorten it" in reply.error["message"]) == (400, True)
        assert cached(await site.complete("x")) == first["total_tokens"] - 1

    run(test)


def test_a_client_that_leaves_changes_nothing(run):
    async def test(site):
        await site.send("POST", "/v1/sessions", {"id": "s"})
        first = (await site.complete([5] * 50)).json["usage"]
        await site.send(
            "POST",
            "/v1/completions",
            {"prompt": [6] * 20, "session_id": "s", "max_tokens": 500, "ignore_eos": True, "stream": True},
            leave_after=2,
        )
        await site.llm.check()
        second = await site.complete([7])
        assert second.json["usage"]["prompt_tokens"] == first["total_tokens"] + 1

    run(test)
