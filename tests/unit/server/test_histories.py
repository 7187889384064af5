"""Conversations that clients of other servers send back: as those servers wrote them, and in older forms."""

from __future__ import annotations

import json

import pytest

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
OLD_CALL = {"name": "add", "arguments": '{"a": 1}'}
SAID = {"role": "assistant", "content": "Two."}
HISTORIES = {
    "content null beside reasoning": [{"role": "assistant", "content": None, "reasoning": "Hm."}],
    "content null beside reasoning_content": [{"role": "assistant", "content": None, "reasoning_content": "Hm."}],
    "no content beside reasoning": [{"role": "assistant", "reasoning": "Hm."}],
    "no content beside reasoning_content": [{"role": "assistant", "reasoning_content": "Hm."}],
    "reasoning and a call": [
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        RESULT,
    ],
    "reasoning_details": [SAID | {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}],
    "reasoning of another form": [SAID | {"reasoning": {"content": [{"text": "Hm."}]}}],
    "annotations": [SAID | {"annotations": [{"type": "url_citation", "url_citation": {"url": "a"}}]}],
    "prefix that ended": [SAID | {"prefix": True}],
    "function_call": [{"role": "assistant", "content": None, "function_call": OLD_CALL}],
    "function_call and its result": [
        {"role": "assistant", "function_call": OLD_CALL},
        {"role": "function", "name": "add", "content": "2"},
    ],
    "thinking_blocks": [SAID | {"thinking_blocks": [THINKING]}],
    "provider_specific_fields": [SAID | {"provider_specific_fields": {"refusal": "", "citations": [1]}}],
    "parts that are thoughts": [{"role": "assistant", "content": [THINKING, {"type": "text", "text": "Two."}]}],
    "thoughts alone": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
    "parts that are calls": [{"role": "assistant", "content": [{"type": "text", "text": "I add."}, USE]}, RESULT],
    "parts that are results": [
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
    ],
    "tool content null": [{"role": "assistant", "tool_calls": [CALL]}, RESULT | {"content": None}],
    "no tool content": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1"}],
    "metadata": [SAID | {"metadata": {"model": "a"}}],
    "id": [SAID | {"id": "msg_1", "created_at": 1, "status": "completed"}],
    "content null alone": [{"role": "assistant", "content": None}],
    "nulls and nothings": [
        SAID | {"refusal": None, "audio": None, "function_call": None, "annotations": [], "tool_calls": None}
    ],
    "arguments that are an object": [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "index": 0, "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        RESULT,
    ],
    "parts of responses": [
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two.", "annotations": []}]}
    ],
    "marks of caches": [SAID | {"cache_control": {"type": "ephemeral"}}],
}
LEFT_OUT = {
    "reasoning_details": ["messages.reasoning_details"],
    "reasoning of another form": ["messages.reasoning"],
    "annotations": ["messages.annotations"],
    "prefix that ended": ["messages.prefix"],
    "thinking_blocks": ["messages.thinking_blocks"],
    "provider_specific_fields": ["messages.provider_specific_fields"],
    "parts that are thoughts": ["messages.content.thinking"],
    "thoughts alone": ["messages.content.redacted_thinking"],
    "metadata": ["messages.metadata"],
    "id": ["messages.id", "messages.created_at", "messages.status"],
    "marks of caches": ["messages.cache_control"],
}


@pytest.fixture
def templated(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }} <tool_call>"
    return server


def chat(server, history, **fields):
    user = {"role": "user", "content": "1+1?"}
    return server.chat(user, *history, user, **{"tools": [TOOL]} | fields)


def rendered(server):
    """Messages that the template got between those of the user."""
    return json.loads(server.engine.prepared[-1])["messages"][1:-1]


@pytest.mark.parametrize("name", HISTORIES)
def test_history_is_answered(templated, name):
    reply = chat(templated, HISTORIES[name])
    assert reply.status == 200, reply.body
    assert reply.json["kvgraft"].get("left_out", []) == LEFT_OUT.get(name, [])
    assert chat(templated, HISTORIES[name], stream=True).status == 200


def test_thoughts_without_content_reach_the_template(templated):
    for name in ("content null beside reasoning", "no content beside reasoning_content"):
        chat(templated, HISTORIES[name])
        assert rendered(templated) == [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]


@pytest.mark.parametrize("name", ["function_call and its result", "parts that are results"])
def test_older_and_other_forms_of_calls_are_calls(templated, name):
    chat(templated, HISTORIES[name])
    called, result = rendered(templated)
    [call] = called["tool_calls"]
    assert (called["content"], call["type"], call["function"]) == (
        "",
        "function",
        {"name": "add", "arguments": {"a": 1}},
    )
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "2", call["id"])


def test_text_stands_beside_calls_and_after_results(templated):
    parts = [
        {"type": "text", "text": "And now?"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
    ]
    chat(templated, [HISTORIES["parts that are calls"][0], {"role": "user", "content": parts}])
    called, result, user = rendered(templated)
    assert (called["content"], len(called["tool_calls"])) == ("I add.", 1)
    assert (result["content"], user) == ("2", {"role": "user", "content": "And now?"})


def test_a_prefix_at_the_end_is_gone_on_with(templated):
    reply = templated.chat({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is", "prefix": True})
    asked = json.loads(templated.engine.prepared[-1])
    assert (asked["continue_final_message"], asked["ends"]) == (True, True)
    assert "left_out" not in reply.json["kvgraft"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None, "id": "a"}, "messages[1].content"),
        ({"role": "user", "content": "a", "images": ["x"]}, "messages[1].images"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
        ),
        ({"role": "user", "content": [USE]}, "messages[1].content[0].type"),
        ({"role": "assistant", "content": [USE | {"name": ""}]}, "messages[1].content[0].name"),
        ({"role": "assistant", "content": [USE | {"id": 1}]}, "messages[1].content[0].id"),
        ({"role": "user", "content": [{"type": "tool_result", "content": "2"}]}, "messages[1].content[0].tool_use_id"),
        ({"role": "function", "content": "2"}, "messages[1].name"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "messages[1].function_call.name"),
        ({"role": "user", "content": "a", "function_call": OLD_CALL}, "messages[1].function_call"),
        (
            {"role": "assistant", "content": "a", "function_call": OLD_CALL, "tool_calls": [CALL]},
            "messages[1].function_call",
        ),
    ],
)
def test_what_would_change_the_meaning_is_refused(templated, message, param):
    reply = chat(templated, [message])
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert templated.engine.prepared == []
