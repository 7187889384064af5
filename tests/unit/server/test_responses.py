"""`/v1/responses`: what the engine is asked, and what OpenAI's client makes of the answers."""

from __future__ import annotations

import asyncio
import json

import httpx2 as httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from kvgraft.errors import RequestError
from kvgraft.server.responses_events import ResponseItems

TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EVENT = TypeAdapter(ResponseStreamEvent)


class Sum(BaseModel):
    total: int


@pytest.fixture
def hermes(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }} <tool_call> {# tool_calls #}"
    server.engine.answer = f"I add.\n\n{CALL}"
    return server


def respond(server, said="Hi", /, **fields):
    return server.post("/v1/responses", {"input": said} | fields)


def ask(server, call):
    """Let `call` speak to the app with OpenAI's client."""

    async def run():
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = AsyncOpenAI(base_url="http://app/v1", api_key="none", http_client=http, max_retries=0)
            return await call(client.responses)

    return asyncio.run(run())


def events(reply):
    """Events of a stream, each checked against OpenAI's types, and named as its type says."""
    found = []
    for block in reply.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_response_has_the_shape_of_openai(server):
    reply = respond(server, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, store=True)
    response = Response.model_validate(reply.json)
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.error) == ("completed", "hello", None)
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert reply.json["store"] is False
    assert response.usage.input_tokens == reply.json["kvgraft"]["num_tokens"]
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert response.usage.output_tokens == 5
    assert "reused_tokens" in reply.json["usage"]["kvgraft"]
    assert server.engine.calls[0].prompt == "System: Be brief.\n\nUser: Hi\n\nAssistant:"


def test_answers_are_as_long_as_fits_unless_it_is_said(server):
    """Codex has no setting for it, and gives up on an answer that is cut off."""
    assert respond(server).status == 200
    assert server.engine.calls[-1].sampling.max_new_tokens > 1_000_000


def test_cut_off_response_is_incomplete(server):
    response = Response.model_validate(respond(server, max_output_tokens=2).json)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("he", "incomplete")
    assert events(respond(server, max_output_tokens=2, stream=True))[-1]["type"] == "response.incomplete"


def test_items_become_messages(hermes):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "add",
            "arguments": '{"a": 1}',
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two.", "annotations": []}], "id": "msg_1"},
    ]
    assert respond(hermes, items, tools=[TOOL]).status == 200
    told = json.loads(hermes.engine.prepared[-1])
    assert [(message["role"], message["content"]) for message in told["messages"]] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", ""),
        ("tool", "2"),
        ("tool", "3"),
        ("assistant", "Two."),
    ]
    calls = told["messages"][2]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("c1", {"a": 1}), ("c2", {})]
    assert told["tools"] == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]


def test_what_came_back_may_be_sent_again(hermes):
    output = respond(hermes, tools=[TOOL]).json["output"]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "2"}
    assert respond(hermes, [{"role": "user", "content": "1+1?"}, *output, result], tools=[TOOL]).status == 200
    messages = json.loads(hermes.engine.prepared[-1])["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert (messages[1]["content"], len(messages[1]["tool_calls"])) == ("I add.", 1)


def test_text_is_streamed_in_typed_events(server):
    found = events(respond(server, stream=True))
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 5,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in found if event["type"].endswith("text.delta")) == "hello"
    assert (found[0]["response"]["status"], found[0]["response"]["usage"]) == ("in_progress", None)
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-1]["response"]["kvgraft"]["exact_tokens"] == 1


def test_calls_are_items(hermes):
    response = Response.model_validate(respond(hermes, tools=[TOOL]).json)
    message, call = response.output
    assert (message.content[0].text, call.name, call.arguments) == ("I add.", "add", '{"a": 1}')
    assert call.call_id.startswith("call_")
    assert call.id.startswith("fc_")
    found = events(respond(hermes, tools=[TOOL], stream=True))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[-7:] == [
        *("content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["message", "function_call"]


def test_functions_can_be_forced(hermes):
    hermes.engine.answer = CALL
    found = events(respond(hermes, tools=[TOOL], tool_choice={"type": "function", "name": "add"}, stream=True))
    deltas = [event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"a": 1}'
    assert len(deltas) > 5
    parts = json.loads(hermes.engine.calls[-1].sampling.structure.source)
    assert parts[1] == {"schema": TOOL["parameters"] | {"additionalProperties": False}}


def test_response_without_items_has_an_empty_message():
    items = ResponseItems()
    kinds = [event["type"].removeprefix("response.") for event in items.end(is_whole=True)]
    assert kinds[:2] == ["output_item.added", "content_part.added"]
    assert items.output[0]["content"][0]["text"] == ""


def test_openai_client_reads_whole_streamed_and_parsed_responses(server):
    whole = ask(server, lambda api: api.create(model="fake", input="Hi"))
    assert whole.output_text == "hello"

    async def streamed(api):
        async with api.stream(model="fake", input="Hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return "".join(deltas), (await stream.get_final_response()).output_text

    assert ask(server, streamed) == ("hello", "hello")
    server.engine.answer = '{"total": 2}'
    parsed = ask(server, lambda api: api.parse(model="fake", input="1+1?", text_format=Sum))
    assert parsed.output_parsed == Sum(total=2)
    structure = server.engine.calls[-1].sampling.structure
    assert structure.kind == "json_schema"
    assert json.loads(structure.source)["required"] == ["total"]


def test_openai_client_reads_calls(hermes):
    async def streamed(api):
        async with api.stream(model="fake", input="Hi", tools=[TOOL | {"strict": False}]) as stream:
            return await stream.get_final_response()

    call = ask(hermes, streamed).output[1]
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')


def test_failure_in_the_stream_is_an_event(server):
    server.engine.failure, server.engine.fail_at = RequestError("the engine failed"), 2
    found = events(respond(server, stream=True))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "the engine failed"}


def test_failure_in_front_of_it_is_an_http_error(server):
    server.engine.failure = RequestError("the engine failed")
    assert respond(server, stream=True).status == respond(server).status == 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "tool", "content": "2"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "2"}]}, "input[0].call_id"),
        ({"instructions": 1}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"stream": True, "kvgraft": {"reuse": "verified", "provisional": True}}, "kvgraft.provisional"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_field_is_named(server, fields, param):
    reply = respond(server, **fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert server.engine.prepared == []


def test_openai_client_is_told_what_is_wrong(server):
    with pytest.raises(BadRequestError, match="the whole conversation"):
        ask(server, lambda api: api.create(model="fake", input="Hi", previous_response_id="resp_1"))


def test_documents_have_names_here_too(server):
    respond(server, "Read this text.", kvgraft={"documents": [{"id": "a", "text": "this text"}]})
    [label] = server.engine.calls[-1].documents
    assert (label.document_id, label.stop - label.start) == ("a", len("this text"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", '{"a": 1e999}'),
        ("tools", '[{"type": "function", "name": "f", "parameters": {"properties": {"a": {"maximum": -1e999}}}}]'),
    ],
)
def test_a_number_that_cannot_be_repeated_is_400(hermes, name, value, stream):
    """Responses repeat what was asked, and JSON has no infinity."""
    body = json.dumps({"input": "Hi", "stream": stream})[:-1] + f', "{name}": {value}}}'
    reply = hermes.post("/v1/responses", body.encode())
    assert (reply.status, reply.error["param"]) == (400, name)
    assert "64 bits" in reply.error["message"]
    assert hermes.engine.prepared == []
