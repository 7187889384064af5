"""Whatever a client sends: an answer in time, never a 5xx, errors always in OpenAI's form."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/sessions")
JSON_TYPE = (b"content-type", b"application/json")

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
VALID = {
    "/v1/completions": {
        "model": "fake",
        "prompt": ["ab", [1, 2]],
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "n": 2,
        "seed": 1,
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": 2,
        "echo": False,
        "suffix": "",
        "best_of": 2,
        "ignore_eos": True,
        "cache_salt": "s",
        "priority": 1,
        "logit_bias": {"5": 1.5},
        "stop_token_ids": [3],
        "bad_words": ["no"],
        "min_tokens": 1,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "kvgraft": {"reuse": "graft", "selection": "none"},
    },
    "/v1/chat/completions": {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "a"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "b", "kvgraft": {"document": "d"}}],
                "name": "n",
            },
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "c", "tool_call_id": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "session_id": "s",
        "response_format": {"type": "text"},
        "kvgraft": {"documents": [{"id": "d", "text": "b"}]},
        "stream": True,
    },
    "/v1/responses": {
        "model": "fake",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
            {"type": "reasoning", "summary": []},
        ],
        "instructions": "a",
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "reasoning": {"effort": None},
        "metadata": {},
        "max_output_tokens": 4,
        "stream": True,
    },
    "/v1/sessions": {"model": "fake", "id": "s", "ttl_s": 5, "cache_salt": "s"},
    "/detokenize": {"model": "fake", "tokens": [97, 98]},
    "/tokenize": {"model": "fake", "prompt": "ab", "add_special_tokens": False},
}


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@st.composite
def mutated(draw):
    endpoint = draw(st.sampled_from(ENDPOINTS))
    body = VALID[endpoint]
    for _ in range(draw(st.integers(1, 2))):
        body = changed(body, draw(st.sampled_from(list(places(body)))), draw(values))
    return endpoint, body


def check(reply):
    assert reply.status is not None
    assert reply.status < 500
    assert b"server_error" not in reply.body
    if reply.status != 200:
        assert reply.error["message"]
        assert reply.error["type"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_mutated_is_valid(server, endpoint):
    server.engine.loaded.tokenizer.chat_template = (
        "{{ messages }} {{ tools }} {{ reasoning_effort }} <tool_call> {# tool_calls #}"
    )
    reply = server.post(endpoint, VALID[endpoint])
    assert reply.status == 200, reply.body


relaxed = settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(mutated())
def test_mutated_bodies(server, case):
    server.engine.loaded.tokenizer.chat_template = (
        "{{ messages }} {{ tools }} {{ reasoning_effort }} <tool_call> {# tool_calls #}"
    )
    endpoint, body = case
    check(server.post(endpoint, json.dumps(body).encode()))


@relaxed
@given(st.sampled_from(ENDPOINTS), values)
def test_arbitrary_json(server, endpoint, body):
    check(server.post(endpoint, json.dumps(body).encode()))


@relaxed
@given(st.sampled_from(ENDPOINTS), st.binary(max_size=200))
@example("/v1/completions", b'{"prompt": "\\uDFFF"}')
@example("/v1/completions", b'\xef\xbb\xbf{"prompt": "x"}')
def test_raw_bytes(server, endpoint, raw):
    check(server.post(endpoint, raw))


@relaxed
@given(st.sampled_from(ENDPOINTS), st.data())
def test_broken_valid_bodies(server, endpoint, data):
    raw = bytearray(json.dumps(VALID[endpoint]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check(server.post(endpoint, bytes(raw)))


header_names = st.sampled_from(
    [b"content-type", b"content-length", b"authorization", b"x-request-id", b"accept", b"x-y"]
)
header_values = st.binary(max_size=40) | st.sampled_from(
    [b"application/json", b"-1", b"99999999999999999999999", b"Bearer k"]
)


odd_requests = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH"]),
        "path": st.sampled_from([*ENDPOINTS, "/", "/health", "/metrics", "/v1/models", "/v1/models/x"])
        | st.text(max_size=20).map("/".__add__),
        "headers": st.lists(st.tuples(header_names, header_values), max_size=5),
        "body": st.lists(st.binary(max_size=30), min_size=1, max_size=3),
    }
)


@relaxed
@given(odd_requests, st.sampled_from([{}, {"api_key": "k"}]))
def test_odd_requests(make_server, request_parts, config):
    reply = make_server(**config).call(**request_parts)
    assert reply.status is not None
    assert reply.status < 500
