"""Streams that are silent for long: a comment says that the server lives, once the request is accepted."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.server.conftest import exchange

from kvgraft.errors import OverloadedError, RequestError
from kvgraft.server.event_sender import KEEP_ALIVE, EventSender

AT_ONCE_S = 1e-12
"""An interval that has passed whenever the clock is read again."""
TURNS = 500
JSON = (b"content-type", b"application/json")
PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
}


async def turns(count=TURNS):
    """Let the event loop turn: whatever is due by then has been done."""
    for _ in range(count):
        await asyncio.sleep(0)


def silent(engine, *, before=TURNS, admission=True, error=None):
    """Have the engine be silent in front of its first token."""
    answer = engine.stream

    async def stream(request, admitted=None):
        if admission:
            admitted()
        await turns(before)
        if error is not None:
            raise error
        async for part in answer(request, admitted):
            yield part

    engine.stream = stream


def post(server, path="/v1/completions", **fields):
    body = json.dumps(PATHS[path] | {"stream": True} | fields).encode()
    return asyncio.run(exchange(server.app, "POST", path, headers=[JSON], body=[body]))


@pytest.mark.parametrize("path", PATHS)
def test_comments_fill_the_silence_before_the_first_token(make_server, path):
    plain, server = make_server(sse_keep_alive_interval=0), make_server(sse_keep_alive_interval=AT_ONCE_S)
    silent(server.engine)
    reply = post(server, path)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.chunks[0] == KEEP_ALIVE
    events = [chunk for chunk in reply.chunks if chunk != KEEP_ALIVE]
    assert len(events) == len(post(plain, path).chunks)
    assert reply.ended


@pytest.mark.parametrize("choices", [1, 3])
def test_no_comment_is_sent_before_the_request_is_accepted(make_server, choices):
    """So that a full server is a 429, and another one can be asked."""
    server = make_server(sse_keep_alive_interval=AT_ONCE_S)
    silent(server.engine, admission=False, error=OverloadedError("too many wait"))
    assert post(server, n=choices).status == 429


def test_of_several_choices_all_have_to_be_accepted(make_server):
    server = make_server(sse_keep_alive_interval=AT_ONCE_S)
    answer, numbers = server.engine.stream, iter(range(3))

    async def stream(request, admitted=None):
        if next(numbers) < 2:
            admitted()
            await asyncio.Event().wait()
        await turns()
        raise OverloadedError("too many wait")
        async for part in answer(request):
            yield part

    server.engine.stream = stream
    assert post(server, n=3, kvgraft={"reuse": "off"}).status == 429


def test_an_error_after_a_comment_is_an_event(make_server):
    server = make_server(sse_keep_alive_interval=AT_ONCE_S)
    silent(server.engine, error=RequestError("broke"))
    reply = post(server)
    assert (reply.status, reply.ended) == (200, True)
    assert json.loads(reply.chunks[-2].removeprefix(b"data: "))["error"]["code"] == "engine_error"


@pytest.mark.parametrize("interval", [0, 3_600])
def test_streams_that_are_not_silent_for_so_long_have_no_comments(make_server, interval):
    server = make_server(sse_keep_alive_interval=interval)
    silent(server.engine)
    assert KEEP_ALIVE not in post(server).chunks


def test_an_error_before_the_interval_has_passed_keeps_its_status(make_server):
    server = make_server(sse_keep_alive_interval=3_600)
    silent(server.engine, error=RequestError("broke"))
    assert post(server).status == 500


def test_answers_that_are_not_streamed_are_as_ever(make_server):
    server = make_server(sse_keep_alive_interval=AT_ONCE_S)
    silent(server.engine)
    assert post(server, stream=False).json["choices"][0]["text"] == "hello"


def test_a_client_that_leaves_in_the_silence_cancels_its_request(make_server):
    server = make_server(sse_keep_alive_interval=AT_ONCE_S)
    server.engine.hold_at = 0
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    reply = server.call("POST", "/v1/completions", headers=[JSON], body=[body], leave_after=2)
    assert set(reply.chunks) == {KEEP_ALIVE}
    assert len(server.engine.cancelled) == 1


def test_bytes_of_a_comment_and_of_an_event_do_not_mix():
    """Writing takes as long as the client takes to read."""

    async def run():
        sent = []

        async def slowly(message):
            sent.append(("begin", message["type"], message.get("body")))
            await turns(50)
            sent.append(("end", message["type"], message.get("body")))

        events = EventSender(slowly, keep_alive_s=AT_ONCE_S)
        async with events.kept_alive():
            events.admit()
            await turns(20)
            for number in range(5):
                await events.send(b"%d" % number)
        await events.end()
        return sent

    sent = asyncio.run(run())
    assert all(begin[1:] == end[1:] for begin, end in zip(sent[::2], sent[1::2], strict=True))
    assert [kind for _, kind, _ in sent[::2]] == ["http.response.start", *["http.response.body"] * (len(sent) // 2 - 1)]
    events = [body for _, _, body in sent[2::2] if body not in (KEEP_ALIVE, b"")]
    assert events == [b"data: %d\n\n" % number for number in range(5)]
    assert (KEEP_ALIVE in [body for _, _, body in sent], sent[-1][2]) == (True, b"")
