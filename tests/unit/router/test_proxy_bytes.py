"""Answers of any length and of any slowness: passed on as they come, in bounded memory, with signs of life while idle."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib

import aiohttp
import pytest
from aiohttp import web
from tests.unit.router.fake_workers import WAIT_S, Words, Worker, routed, run, until
from tests.unit.router.test_proxy import COMPLETION, asked, events, metric, metrics

from kvgraft.router.upstream import KEEP_ALIVE, Answer
from kvgraft.tokenising import LONG_TEXT

LONG = 1 << 21


class Slow(Worker):
    """Sends its answer in two halves, and the second when it is released.

    Attributes:
        halves: What it sends.
        headers_sent: Of the answer, with `_` for `-`.
        breaks: Whether it breaks off after the first half.
    """

    def __init__(self, worker, *halves, breaks=False, **headers):
        super().__init__(worker.name)
        self.halves, self.headers_sent, self.breaks = halves, {"content_type": "text/event-stream"} | headers, breaks
        self.behaviour = "halves"

    async def _halves(self, request):
        headers = {name.replace("_", "-"): value for name, value in self.headers_sent.items()}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if self.halves[0]:
            await response.write(self.halves[0])
        await self.release.wait()
        if self.breaks:
            request.transport.close()
            return response
        await response.write(self.halves[1])
        return response


def served(test, *halves, keep_alive_s=None, **how):
    """Run a test with one slow worker."""

    async def whole(one, _two):
        slow = Slow(one, *halves, **how)
        await slow.start()
        try:
            async with routed(slow, keep_alive_s=keep_alive_s) as (session, context):
                await test(slow, session, context)
        finally:
            slow.release.set()
            await slow.stop()

    run(whole)


async def first(response, num_bytes):
    return await response.content.readexactly(num_bytes)


def test_a_long_event_is_passed_on_before_it_ends():
    event = b"data: " + json.dumps({"logprobs": "x" * LONG}).encode() + b"\n\n"

    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        begun = await first(response, LONG // 2)
        slow.release.set()
        assert begun + await response.read() == event + b"data: [DONE]\n\n"

    served(test, event[: LONG // 2 + 70_000], event[LONG // 2 + 70_000 :] + b"data: [DONE]\n\n")


def test_a_long_answer_is_passed_on_before_it_ends():
    body = json.dumps({"text": "x" * 2 * LONG}).encode()

    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        begun = await first(response, LONG)
        assert response.headers["x-kvgraft-worker"] == "one"
        slow.release.set()
        assert begun + await response.read() == body
        assert metric(await metrics(session), 'kvgraft_router:requests_total{outcome="ok",worker="one"}') == 1

    served(test, body[: LONG + 70_000], body[LONG + 70_000 :], content_type="application/json")


def test_a_long_answer_that_breaks_off_does_not_end_as_if_it_were_whole():
    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        await first(response, LONG)
        slow.release.set()
        with pytest.raises(aiohttp.ClientError):
            await response.read()
        text = await metrics(session)
        assert metric(text, 'kvgraft_router:requests_total{outcome="broken",worker="one"}') == 1
        assert not any(load.num_in_flight for load in context.router.loads.values())

    served(test, b"x" * (LONG + 70_000), content_type="application/json", breaks=True)


def test_a_long_event_that_breaks_off_is_ended_by_an_error_of_its_own():
    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        await first(response, LONG)
        slow.release.set()
        told = (await response.read()).split(b"\n\n")
        assert json.loads(told[-2].removeprefix(b"data: "))["error"]["code"] == "worker_failed"

    served(test, b"data: " + b"x" * (LONG + 70_000), breaks=True)


def test_short_answers_keep_their_length_and_are_tried_elsewhere():
    """As before: one that breaks off before its end was told to nobody."""

    async def test(one, two):
        broken = Slow(one, b"{", content_type="application/json", breaks=True)
        broken.release.set()
        await broken.start()
        two.behaviour = "whole"
        async with routed(broken, two, policy="round_robin") as (session, _):
            answers = [await asked(session) for _ in range(2)]
            assert answers == [(200, "two")] * 2
            response = await session.post("/v1/completions", json=COMPLETION)
            assert response.content_length == len(await response.read())
        await broken.stop()

    run(test)


@pytest.mark.parametrize("begun", [b"", b"data: 1\n\n", b"data: 1\n\ndata: half"])
def test_comments_come_while_a_stream_is_idle(begun):
    """Before the first token, between events, and while the rest of an event is on its way."""

    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        assert (response.status, response.content_type) == (200, "text/event-stream")
        told = b""
        while told.count(b": keep-alive\n\n") < 3:
            told += await response.content.readany()
        slow.release.set()
        told += await response.read()
        assert told.replace(b": keep-alive\n\n", b"") == begun + b"data: 2\n\n"
        times = [load.seconds_per_token for load in context.router.loads.values()]
        assert len(times) == 1

    served(test, begun, b"data: 2\n\n", keep_alive_s=0.02)


class Said:
    """A response of which a test says what comes, and when nothing does (None)."""

    def __init__(self, *chunks):
        self.chunks = list(chunks)
        self.content = self

    async def readany(self):
        chunk = self.chunks.pop(0)
        if chunk is None:
            await asyncio.Event().wait()
        return chunk


def test_no_comment_comes_into_the_middle_of_a_long_event():
    begun, end = b"data: " + b"x" * 70_000, b"x\n\nid: 1"
    response = Said(None, None, end, None, b"\ndata: 2\n\n", None, b"")

    async def pieces():
        return [piece async for piece in Answer(200, [], True, begun, None, response).pieces(0.001)]

    told = asyncio.run(pieces())
    assert told == [begun, b"x\n\n", KEEP_ALIVE, b"id: 1\ndata: 2\n\n", KEEP_ALIVE]


def test_without_an_interval_nothing_is_added():
    async def test(slow, session, context):
        slow.release.set()
        response = await session.post("/v1/completions", json=COMPLETION)
        assert await events(response) == ["1", "2"]

    served(test, b"data: 1\n\n", b"data: 2\n\n")


def test_errors_before_admission_keep_their_status():
    """However long the worker takes to say so."""

    async def test(one, two):
        one.behaviour = "hang_busy"

        async def hang_busy(request):
            await asyncio.sleep(0.2)  # ten intervals
            return await one._busy(request)

        one._hang_busy = hang_busy
        async with routed(one, keep_alive_s=0.02) as (session, _):
            response = await session.post("/v1/completions", json=COMPLETION)
            assert (response.status, await response.json()) == (503, {"error": {"message": "one"}})

    run(test)


def test_a_stream_that_breaks_off_while_idle_ends_with_an_error():
    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        await response.content.readuntil(b"keep-alive\n\n")
        slow.release.set()
        told = (await response.read()).split(b"\n\n")
        assert json.loads(told[-2].removeprefix(b"data: "))["error"]["code"] == "worker_failed"

    served(test, b"", breaks=True, keep_alive_s=0.02)


def gzipped(*parts):
    """Return compressed parts of one stream, each of which can be read when it is there."""
    packer = zlib.compressobj(wbits=31)
    flushes = [zlib.Z_SYNC_FLUSH] * (len(parts) - 1) + [zlib.Z_FINISH]
    return [packer.compress(part) + packer.flush(flush) for part, flush in zip(parts, flushes, strict=True)]


def test_compressed_events_are_passed_on_as_they_come_with_nothing_between():
    parts = b'data: {"n": 0}\n\n', b"data: [DONE]\n\n"

    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        assert await first(response, len(parts[0])) == parts[0]
        await asyncio.sleep(0.05)  # time enough for comments, were there any
        slow.release.set()
        assert await response.read() == parts[1]

    served(test, *gzipped(*parts), content_encoding="gzip", keep_alive_s=0.01)


def test_compressed_events_that_break_off_get_no_readable_end():
    parts = b'data: {"n": 0}\n\n', b"data: [DONE]\n\n"

    async def test(slow, session, context):
        response = await session.post("/v1/completions", json=COMPLETION)
        assert await first(response, len(parts[0])) == parts[0]
        slow.release.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
        assert metric(await metrics(session), 'kvgraft_router:requests_total{outcome="broken",worker="one"}') == 1

    served(test, *gzipped(*parts), content_encoding="gzip", breaks=True)


class Waiting(Words):
    """A tokenizer that takes its time for long texts: until it is told to go on."""

    def __init__(self):
        self.go_on, self.begun, self.at_once, self.most_at_once = threading.Event(), 0, 0, 0

    def __call__(self, text, add_special_tokens=True):
        if len(text) > LONG_TEXT:
            self.begun, self.at_once = self.begun + 1, self.at_once + 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            assert self.go_on.wait(WAIT_S)
            self.at_once -= 1
        return super().__call__(text, add_special_tokens)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
def test_long_prompts_hold_up_no_short_one(path):
    """They wait for one another instead, on a thread of their own."""
    tokenizer = Waiting()

    async def test(one, two):
        async with routed(one, two, tokenizer=tokenizer) as (session, _):
            long = {**COMPLETION, "prompt": "word " * (LONG_TEXT // 2)}
            sent = [asyncio.create_task(session.post(path, json=long)) for _ in range(40)]
            try:
                await until(lambda: tokenizer.begun)
                assert [(await asked(session))[0] for _ in range(5)] == [200] * 5
                async with session.post("/v1/score", json=COMPLETION) as response:
                    assert response.status == 200
            finally:
                tokenizer.go_on.set()
            assert [(await task).status for task in sent] == [200] * 40
            assert tokenizer.most_at_once == 1

    run(test)
