from __future__ import annotations

import json

import pytest

from kvgraft.server.chat import DEFAULT_CHAT_TOKENS


def rendered(server):
    return json.loads(server.engine.prepared[-1])


@pytest.fixture
def templated(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }}"
    return server


def test_chat_has_the_shape_of_openai(server):
    answer = server.chat().json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["kvgraft"]["num_tokens"] == answer["usage"]["prompt_tokens"]


def test_plain_template_writes_roles_and_stops_where_the_user_speaks(server):
    server.chat(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        stop="END",
    )
    call = server.engine.calls[0]
    assert call.prompt == "System: Be brief.\n\nUser: Hi\nthere\n\nAssistant:"
    assert call.sampling.stop == ("END", "\nUser:")
    assert call.add_special_tokens is True


def test_template_gets_messages_and_tools(templated):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = templated.chat(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1+1?", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        tools=tools,
        tool_choice="auto",
    )
    assert reply.status == 200
    assert rendered(templated)["tools"] == tools
    messages = rendered(templated)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert messages[3]["tool_call_id"] == "c1"
    assert templated.engine.calls[0].add_special_tokens is False
    assert templated.engine.calls[0].sampling.stop == ()


def test_tool_choice_none_hides_tools(templated):
    templated.chat(tools=[{"type": "function", "function": {"name": "add"}}], tool_choice="none")
    assert rendered(templated)["tools"] is None


@pytest.mark.parametrize("arguments", ["not json", "[1]", None])
def test_arguments_that_are_no_object_are_passed_as_they_are(templated, arguments):
    templated.chat(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
    )
    assert rendered(templated)["messages"][0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_template_that_refuses_is_400_in_one_line(templated):
    reply = templated.chat({"role": "user", "content": "refuse me"})
    assert reply.status == 400
    assert reply.error["message"] == "the model's chat template refuses the messages: roles must alternate"


def test_max_tokens_have_two_names_and_a_bounded_default(server):
    server.chat()
    server.chat(max_tokens=3)
    server.chat(max_completion_tokens=2)
    server.chat(max_tokens=4, max_completion_tokens=4)
    assert [call.sampling.max_new_tokens for call in server.engine.calls] == [DEFAULT_CHAT_TOKENS, 3, 2, 4]


def test_two_max_tokens_that_differ_are_refused(server):
    reply = server.chat(max_tokens=3, max_completion_tokens=2)
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")
    assert reply.error["message"] == "max_tokens is 3 and max_completion_tokens is 2; leave out one of them"


def test_logprobs_have_the_shape_of_openai(server):
    told = server.chat(logprobs=True, top_logprobs=1, max_tokens=1).json["choices"][0]["logprobs"]
    assert told["content"] == [
        {
            "token": "h",
            "logprob": -0.5,
            "bytes": [104],
            "top_logprobs": [{"token": "a", "logprob": -9999.0, "bytes": [97]}],
        }
    ]


def test_tokens_named_by_their_ids_keep_their_bytes(server):
    asked = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    (token,) = server.chat(**asked).json["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:104", [104])
    assert [(top["token"], top["bytes"]) for top in token["top_logprobs"]] == [("token_id:97", [97])]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"text": "Hi"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "a", "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": 3}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
def test_bad_field_is_named(server, fields, param):
    reply = server.chat(**fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert server.engine.prepared == []


def test_chat_needs_a_tokenizer(server):
    server.engine.loaded.tokenizer = None
    assert "token ids" in server.chat().error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_text_without_the_token_that_ends_it(server, stream):
    server.engine.ends_with_token = True
    reply = server.chat(logprobs=True, stream=stream)
    choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
    told = [token["token"] for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert "".join(told) == "hell"
    whole = server.complete("a", logprobs=1).json["choices"][0]
    assert whole["logprobs"]["tokens"] == list("hello")
