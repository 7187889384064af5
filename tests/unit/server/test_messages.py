"""`/v1/messages`: what the engine is asked, and what a client of Anthropic's API gets, whole and streamed."""

from __future__ import annotations

import json

import pytest

from kvgraft.errors import RequestError

TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "Hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
CODE = {
    "system": [{"type": "text", "text": "x-header: 1"}, {"type": "text", "text": "You code.", **MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": "Now.", **MARK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}], **MARK},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "Three tokens are left."},
    ],
    "tools": [TOOL | MARK, {"type": "web_search_20250305", "name": "web_search"}],
    "metadata": {"user_id": "1"},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "temperature": 1,
}


@pytest.fixture
def hermes(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }} <tool_call> {# tool_calls #}"
    server.engine.answer = f"I add.\n\n{CALL}"
    return server


def send(server, *messages, path="/v1/messages", **fields):
    body = {"model": "fake", "max_tokens": 100, "messages": list(messages) or [USER]} | fields
    return server.post(path, body)


def rendered(server):
    return json.loads(server.engine.prepared[-1])


def events(reply):
    """Events of a stream, named as their type says."""
    found = []
    for block in reply.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(found):
    """The message that a client makes of events."""
    message = found[0]["message"]
    texts = {}
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                texts[event["index"]] = ""
            case "content_block_delta":
                delta = event["delta"]
                texts[event["index"]] += delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
            case "content_block_stop":
                block = message["content"][event["index"]]
                text = texts.pop(event["index"])
                block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    assert not texts
    return message


def test_message_has_the_shape_of_anthropic(server):
    reply = send(server, system="Be brief.").json
    assert reply["id"].startswith("msg_")
    assert {key: reply[key] for key in ("type", "role", "model", "content", "stop_reason", "stop_sequence")} == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    num = reply["kvgraft"]["num_tokens"]
    assert reply["usage"] == {
        "input_tokens": num - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 5,
    }
    assert server.engine.calls[0].prompt == "System: Be brief.\n\nUser: Hi\n\nAssistant:"


def test_what_claude_code_sends_is_a_chat(hermes):
    reply = send(hermes, **CODE)
    assert reply.status == 200, reply.body
    assert sorted(reply.json["kvgraft"]["left_out"]) == [
        "context_management",
        "messages.content.thinking",
        "output_config.effort",
        "thinking",
        "tools.web_search_20250305",
    ]
    told = rendered(hermes)
    assert [(message["role"], message["content"]) for message in told["messages"]] == [
        ("system", "x-header: 1\nYou code."),
        ("user", "Add.\nNow."),
        ("assistant", "I add."),
        ("tool", "2"),
        ("user", "Go on."),
        ("system", "Three tokens are left."),
    ]
    [call] = told["messages"][2]["tool_calls"]
    assert (call["id"], call["function"]) == ("toolu_1", {"name": "add", "arguments": {"a": 1}})
    assert told["messages"][3]["tool_call_id"] == "toolu_1"
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert told["tools"] == [{"type": "function", "function": function}]


def test_calls_are_blocks(hermes):
    reply = send(hermes, tools=[TOOL]).json
    text, call = reply["content"]
    assert (text, reply["stop_reason"]) == ({"type": "text", "text": "I add."}, "tool_use")
    assert call["id"].startswith("toolu_")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})


def test_what_came_back_may_be_sent_again(hermes):
    content = send(hermes, tools=[TOOL]).json["content"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "2"}
    said = (USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]})
    assert send(hermes, *said, tools=[TOOL]).status == 200
    messages = rendered(hermes)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_text_is_streamed_in_events(server):
    found = events(send(server, stream=True))
    assert [event["type"] for event in found] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 5,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert (found[0]["message"]["content"], found[0]["message"]["stop_reason"]) == ([], None)
    assert found[0]["message"]["usage"]["input_tokens"] > 0
    assert found[-2]["usage"]["output_tokens"] == 5
    assert found[-2]["kvgraft"]["exact_tokens"] == 1
    whole = send(server).json
    assert put_together(found) == {key: whole[key] for key in whole if key != "kvgraft"} | {
        "id": found[0]["message"]["id"]
    }


def test_calls_are_streamed_as_json(hermes):
    found = events(send(hermes, tools=[TOOL], stream=True))
    message = put_together(found)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert (message["content"][1]["input"], message["stop_reason"]) == ({"a": 1}, "tool_use")
    started = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert (started[1]["input"], started[1]["name"]) == ({}, "add")


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "add"}, True)],
)
def test_calls_can_be_forced(hermes, choice, is_forced):
    hermes.engine.answer = CALL
    message = put_together(events(send(hermes, tools=[TOOL], tool_choice=choice, stream=True)))
    assert message["content"][0]["input"] == {"a": 1}
    assert (hermes.engine.calls[-1].sampling.structure is not None) == is_forced


def test_tools_that_are_not_to_be_called_are_not_shown(hermes):
    assert send(hermes, tools=[TOOL], tool_choice={"type": "none"}).status == 200
    assert rendered(hermes)["tools"] is None


def test_call_that_is_cut_off_has_no_arguments(hermes):
    hermes.engine.answer = CALL
    reply = send(hermes, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=len(CALL) - 20).json
    assert (reply["stop_reason"], reply["content"][0]["input"]) == ("max_tokens", {})


def test_limits_and_stops_are_reasons_of_their_own(server):
    assert send(server, max_tokens=2).json["stop_reason"] == "max_tokens"
    server.engine.stopped_by = "END"
    for reply in (
        send(server, stop_sequences=["END"]).json,
        put_together(events(send(server, stop_sequences=["END"], stream=True))),
    ):
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
        assert reply["content"][0]["text"] == "hello"
    sampling = server.engine.calls[-1].sampling
    assert (sampling.stop, sampling.include_stop) == (("END", "\nUser:"), True)


def test_a_stop_of_the_template_is_not_the_client_s(server):
    server.engine.stopped_by = "\nUser:"
    reply = send(server, stop_sequences=["END"]).json
    assert (reply["stop_reason"], reply["stop_sequence"], reply["content"][0]["text"]) == ("end_turn", None, "hello")


def test_answer_goes_on_with_the_last_message(hermes):
    assert send(hermes, USER, {"role": "assistant", "content": "It is ("}).status == 200
    assert rendered(hermes)["continue_final_message"] is True


def test_schema_of_the_answer_is_held(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert send(server, output_config={"format": {"type": "json_schema", "schema": schema}}).status == 200
    structure = server.engine.calls[-1].sampling.structure
    assert (structure.kind, json.loads(structure.source)["properties"]) == ("json_schema", schema["properties"])


def test_options_of_ours_are_taken(server):
    assert send(server, kvgraft={"reuse": "exact"}, cache_salt="a", top_k=3).status == 200
    call = server.engine.calls[-1]
    assert (call.reuse, call.cache_salt, call.sampling.top_k) == ("exact", "a", 3)


def test_tokens_are_counted(hermes):
    counted = {key: CODE[key] for key in ("system", "messages", "tools", "thinking")}
    reply = hermes.post("/v1/messages/count_tokens", {"model": "fake"} | counted)
    assert reply.json == {"input_tokens": len(hermes.engine.prepared[-1].encode())}
    asked = send(hermes, **CODE).json
    assert asked["kvgraft"]["num_tokens"] == reply.json["input_tokens"]


def test_agents_go_on_after_a_tool_came_back_with_a_picture(hermes):
    parts = [
        {"type": "image", "source": {"type": "base64", "data": "aGk="}},
        {"type": "tool_reference", "tool_name": "b"},
    ]
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}
    beside = {"type": "document", "source": {"type": "base64", "data": "aGk="}}
    reply = send(hermes, USER, used, {"role": "user", "content": [result, beside]}, tools=[TOOL])
    names = [f"messages.content.{kind}" for kind in ("image", "tool_reference", "document")]
    assert reply.json["kvgraft"]["left_out"] == names
    shown = [(said["role"], said["content"]) for said in json.loads(hermes.engine.prepared[-1])["messages"]]
    assert shown[-2:] == [
        ("tool", "[image left out: the server reads text alone]"),
        ("user", "[document left out: the server reads text alone]"),
    ]


def test_tokens_are_said_where_they_are_counted_alone(server):
    counted = send(server, path="/v1/messages/count_tokens", return_token_ids=True).json
    assert bytes(counted["prompt_token_ids"]).decode() == server.engine.prepared[-1]
    assert len(counted["prompt_token_ids"]) == counted["input_tokens"]
    assert send(server, return_token_ids=False).status == 200
    refused = send(server, return_token_ids=True)
    assert refused.status == 400
    assert "ask `/v1/responses/input_tokens` or `/v1/messages/count_tokens`" in refused.error["message"]
    wrong = send(server, path="/v1/messages/count_tokens", return_token_ids="yes")
    assert "return_token_ids must be true or false" in wrong.error["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "messages is missing or empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[1].content[0].tool_use_id",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type must be one of"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "names no function"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'required', but there are no tools"),
        ({"max_tokens": 0}, "max_tokens must be between"),
        ({"stop_sequences": 3}, "stop_sequences must be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"output_format": {"type": "json_schema"}}, "use `output_config.format`"),
        ({"kvgraft": {"reuse": "verified", "provisional": True}, "stream": True}, "kvgraft.provisional"),
        ({"zzz": 1}, "'zzz' is no field of messages"),
    ],
)
def test_errors_have_the_form_of_anthropic(server, fields, text):
    reply = send(server, **fields)
    assert reply.status == 400, reply.body
    assert (reply.json["type"], reply.error["type"]) == ("error", "invalid_request_error")
    assert text in reply.error["message"]
    assert server.engine.prepared == []


def test_other_errors_have_it_too(make_server):
    server = make_server()
    assert send(server, model="claude").error["type"] == "not_found_error"
    assert send(server, path="/v1/messages/batches").error["type"] == "not_found_error"
    assert "param" in server.chat(model="claude").error
    server.engine.failure = RequestError("the engine failed")
    assert (send(server).status, send(server).error) == (500, {"type": "api_error", "message": "the engine failed"})
    server.engine.fail_at = 2
    last = events(send(server, stream=True))[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the engine failed"}}


@pytest.mark.parametrize("stream", [False, True])
def test_clients_are_told_in_their_words_that_a_conversation_is_too_long(server, stream):
    """Claude Code shortens it then, and asks again; the words are all it goes by."""
    long = {"role": "user", "content": "a" * server.engine.max_model_len}
    reply = send(server, long, stream=stream)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["message"].startswith("prompt is too long: the prompt has")
    assert "prompt is too long" not in server.chat(long).error["message"]


def test_keys_are_taken_from_the_header_of_anthropic(make_server):
    server = make_server(api_key=("secret",))
    body = {"messages": [USER], "max_tokens": 9}
    for headers, status in (
        ([(b"x-api-key", b"secret")], 200),
        ([(b"authorization", b"Bearer secret")], 200),
        ([(b"x-api-key", b"wrong")], 401),
        ([(b"x-api-key", b"")], 401),
        ([], 401),
        ([(b"authorization", b"Bearer wrong"), (b"x-api-key", b"secret")], 401),
    ):
        reply = server.post("/v1/messages", body, headers=headers)
        assert reply.status == status
        assert status == 200 or reply.error["type"] == "authentication_error"
