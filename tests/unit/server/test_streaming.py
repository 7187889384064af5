from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from kvgraft.engine.requests.request import PromptFacts
from kvgraft.errors import OverloadedError, RequestError, StructureError


def post(server, path, value, **options):
    body = json.dumps(value).encode()
    return server.call("POST", path, headers=[(b"content-type", b"application/json")], body=[body], **options)


def test_completion_stream_ends_with_reason_report_and_done(server):
    reply = server.complete(stream=True)
    *chunks, done = reply.events
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert reply.ended
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert [("kvgraft" in chunk, "usage" in chunk) for chunk in chunks] == [(False, False)] * 4 + [(True, False)]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(server):
    *chunks, usage, _ = server.complete(stream=True, stream_options={"include_usage": True}).events
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_usage_so_far_comes_in_every_chunk_when_asked_for(server, call):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = getattr(server, call)(stream=True, stream_options=options).events
    num_prompt = len(server.engine.prepared[0])
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
        for count in range(1, 6)
    ]
    assert last["usage"]["total_tokens"] == num_prompt + 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_usage_so_far_is_of_all_choices_and_comes_without_a_last_chunk_unless_asked_for(server):
    options = {"continuous_usage_stats": True}
    *chunks, _ = server.complete(["one", "other"], n=2, stream=True, stream_options=options).events
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    usages = [chunk["usage"] for chunk in chunks]
    assert {usage["prompt_tokens"] for usage in usages} == {3 + 5}
    assert [usage["completion_tokens"] for usage in usages] == list(range(1, 21))


def test_usage_so_far_counts_all_that_a_session_holds(server):
    stream = server.engine.stream

    async def behind_the_session(request, admitted=None):
        async for part in stream(request):
            yield part if part.prompt is None else replace(part, prompt=PromptFacts(np.arange(9)))

    server.engine.stream = behind_the_session
    options = {"continuous_usage_stats": True}
    chunk, *_ = server.complete("ab", session_id="s", stream=True, stream_options=options, return_token_ids=True).events
    assert chunk["usage"]["prompt_tokens"] == 9
    assert chunk["choices"][0]["prompt_token_ids"] == list(range(9))


def test_chat_stream_names_the_role_once(server):
    *chunks, _ = server.chat(stream=True).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "h"}
    assert all("role" not in delta for delta in deltas[1:])
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_several_choices_are_streamed_side_by_side(server):
    *chunks, _ = server.complete(["one", "other"], stream=True).events
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in (0, 1):
        assert "".join(choice["text"] for choice in choices if choice["index"] == index) == "hello"
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    assert sum("kvgraft" in choice for choice in choices) == 2
    assert not any("kvgraft" in chunk for chunk in chunks)


def test_parts_without_text_are_left_out_but_for_the_first(server):
    server.engine.answer = "ab"
    stream = server.engine.stream

    async def with_silence(request, admitted=None):
        async for part in stream(request):
            for _ in range(2):
                yield type(part)("", part.token_id, None, None)
            yield part

    server.engine.stream = with_silence
    *chunks, _ = server.complete(stream=True).events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "a", "b"]


def test_text_offsets_go_on_from_chunk_to_chunk(server):
    *chunks, _ = server.complete(stream=True, logprobs=0).events
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (OverloadedError("too many wait"), (429, "rate_limit_error", "overloaded")),
        (RequestError("the engine failed"), (500, "server_error", "engine_error")),
        (ZeroDivisionError("surprise"), (500, "server_error", None)),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
def test_failure_before_the_first_token_is_an_http_error(server, failure, told, stream, prompt):
    server.engine.failure = failure
    reply = server.complete(prompt, stream=stream)
    assert (reply.status, reply.error["type"], reply.error["code"]) == told
    assert "surprise" not in reply.error["message"]
    assert ("retry-after" in reply.headers) == (reply.status == 429)


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
@pytest.mark.parametrize("failure", [OverloadedError("shut down"), RequestError("broke"), ZeroDivisionError()])
def test_failure_in_the_stream_is_an_event_behind_which_it_ends(server, prompt, failure):
    server.engine.failure, server.engine.fail_at = failure, 2
    reply = server.complete(prompt, stream=True)
    assert reply.status == 200
    assert reply.ended
    assert "error" in reply.events[-1]
    assert "[DONE]" not in reply.events
    assert "choices" in reply.events[0]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_a_structure_that_cannot_be_followed_is_the_client_s_fault(server, stream, fail_at, caplog):
    server.engine.failure, server.engine.fail_at = StructureError("the structure cannot be followed further"), fail_at
    server.engine.is_closing = True
    reply = server.complete(stream=stream, response_format=SCHEMA)
    begun = stream and fail_at
    assert reply.status == (200 if begun else 400)
    error = reply.events[-1]["error"] if begun else reply.error
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_failure_while_closing_is_503(server):
    server.engine.failure, server.engine.is_closing = OverloadedError("the engine has stopped"), True
    reply = server.complete()
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
def test_client_that_leaves_a_stream_cancels_its_requests(server, prompt):
    server.engine.hold_at = 3
    reply = post(server, "/v1/completions", {"prompt": prompt, "stream": True}, leave_after=2)
    assert not reply.ended
    assert len(server.engine.cancelled) == len([prompt] if isinstance(prompt, str) else prompt)


def test_client_that_leaves_while_waiting_cancels_its_request(server):
    server.engine.hold_at = 0
    reply = post(server, "/v1/completions", {"prompt": "x"}, leave_after=0)
    assert reply.status is None
    assert len(server.engine.cancelled) == 1
    assert b'status="499"' in server.metrics.exposition()


def test_requests_after_shutdown_began_get_503(server):
    asyncio.run(server.app.state.context.close(3.0))
    reply = server.complete()
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert server.engine.closed_with == [3.0]
