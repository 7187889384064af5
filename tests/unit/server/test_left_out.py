"""What clients send in general and this server does not serve: left out, named in the report and once in the log."""

from __future__ import annotations

import json
import logging

import pytest
from openai.types.responses import Response

FUNCTION = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [FUNCTION | {"name": "spawn"}]}
TOOLS = [FUNCTION, PATCH, {"type": "web_search"}, {"type": "local_shell"}, AGENTS, {"type": "image_generation"}]
ASKED = {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": "ls"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a.py"}
LOCAL = {"type": "local_shell_call", "id": "l1", "call_id": "c2", "status": "completed"}
GOAL = {
    "type": "function_call_output",
    "id": "fco_1",
    "name": "goal_objective",
    "namespace": "agent",
    "output": "Done.",
}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "high"}
EXEC = {"type": "exec", "command": ["ls", "-l"], "env": {}}
CODEX = {
    "one function": {"tools": [FUNCTION]},
    "every kind of tool": {"tools": TOOLS},
    "custom": {"tools": [FUNCTION, PATCH]},
    "web search": {"tools": [FUNCTION, {"type": "web_search", "external_web_access": False}]},
    "local shell": {"tools": [FUNCTION, {"type": "local_shell"}]},
    "namespace": {"tools": [FUNCTION, AGENTS]},
    "image generation": {"tools": [FUNCTION, {"type": "image_generation", "output_format": "png"}]},
    "no function at all": {"tools": [{"type": "web_search"}, PATCH]},
    "summary of reasoning": {"reasoning": {"summary": "auto"}},
    "effort of reasoning": {"reasoning": {"effort": "medium"}},
    "more of reasoning": {"reasoning": {"effort": "high", "summary": "detailed", "context": "all_turns"}},
    "enciphered reasoning": {"include": ["reasoning.encrypted_content"]},
    "sources": {"include": ["web_search_call.action.sources"]},
    "verbosity": {"text": {"verbosity": "low"}},
    "verbosity beside a format": {"text": {"verbosity": "high", "format": {"type": "text"}}},
    "metadata of the client": {"client_metadata": {"session": "1"}},
    "allowed tools": {
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
    },
    "calls of functions": {"input": [ASKED, CALLED, RESULT]},
    "calls of custom tools": {
        "input": [
            ASKED,
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        ]
    },
    "searches": {"input": [{"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "a"}}, ASKED]},
    "references": {"input": [{"type": "item_reference", "id": "msg_1"}, ASKED]},
    "calls of the local shell": {
        "input": [ASKED, LOCAL | {"action": EXEC}, {"type": "local_shell_call_output", "id": "c2", "output": "a.py"}]
    },
    "reasoning": {"input": [ASKED, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, CALLED, RESULT]},
    "what an agent says of itself": {"input": [ASKED, CALLED, RESULT, GOAL]},
    "a picture that a tool came back with": {"input": [ASKED, CALLED, RESULT | {"output": [PICTURE]}]},
    "how it is served": {"store": False, "prompt_cache_key": "1", "service_tier": "auto", "parallel_tool_calls": True},
}


@pytest.fixture
def templated(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }} <tool_call>"
    return server


def respond(server, **fields):
    return server.post("/v1/responses", {"input": [ASKED], "instructions": "You code.", "stream": False} | fields)


def rendered(server):
    return json.loads(server.engine.prepared[-1])


@pytest.mark.parametrize("fields", CODEX.values(), ids=CODEX)
def test_what_codex_sends_is_answered(templated, fields):
    reply = respond(templated, **fields)
    assert reply.status == 200, reply.body
    assert Response.model_validate(reply.json).output_text == "hello"
    assert respond(templated, **fields | {"stream": True}).status == 200


def test_report_names_what_was_left_out(templated):
    reply = respond(
        templated,
        input=[{"type": "item_reference", "id": "msg_1"}, ASKED],
        tools=TOOLS,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
    )
    assert sorted(reply.json["kvgraft"]["left_out"]) == [
        "input.item_reference",
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        *("tools.custom", "tools.image_generation", "tools.local_shell", "tools.namespace", "tools.web_search"),
    ]
    assert [tool["function"]["name"] for tool in rendered(templated)["tools"]] == ["shell"]
    assert "left_out" not in respond(templated).json["kvgraft"]


def test_streams_name_it_at_their_end(templated):
    last = templated.chat(tools=[{"type": "custom", "custom": {"name": "f"}}], stream=True).events[-2]
    assert last["kvgraft"]["left_out"] == ["tools.custom"]


def test_log_names_it_once(templated, caplog):
    with caplog.at_level(logging.WARNING, "kvgraft"):
        for _ in range(3):
            respond(templated, tools=TOOLS[:3])
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert [name for text in told for name in ("tools.custom", "tools.web_search") if name in text] == [
        "tools.custom",
        "tools.web_search",
    ]


def test_log_does_not_grow_with_names_that_clients_make_up(templated, caplog):
    with caplog.at_level(logging.WARNING, "kvgraft"):
        for number in range(400):
            templated.chat({"role": "user", "content": "Hi", f"x{number}": 1})
    assert len([record for record in caplog.records if "left out" in record.getMessage()]) < 300


def test_effort_that_the_template_reads_is_served(templated):
    templated.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ reasoning_effort }}"
    reply = respond(templated, reasoning={"effort": "low", "summary": "auto"})
    assert reply.json["kvgraft"]["left_out"] == ["reasoning.summary"]
    assert rendered(templated)["reasoning_effort"] == "low"


def test_calls_of_other_tools_stay_in_the_conversation(templated):
    respond(templated, **CODEX["calls of custom tools"])
    _, _, called, result = rendered(templated)["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "Done.", "c1")
    respond(templated, **CODEX["calls of the local shell"])
    _, _, called, result = rendered(templated)["messages"]
    assert called["tool_calls"][0]["function"] == {
        "name": "local_shell",
        "arguments": {"command": ["ls", "-l"], "env": {}},
    }
    assert (result["content"], result["tool_call_id"]) == ("a.py", "c2")


def test_outputs_without_a_call_are_of_the_tool_that_they_name(templated):
    assert respond(templated, **CODEX["what an agent says of itself"]).status == 200
    said = rendered(templated)["messages"][-1]
    assert said == {"role": "tool", "content": "Done.", "tool_call_id": "goal_objective"}


def test_model_is_told_of_pictures_that_a_tool_came_back_with(templated):
    part = {"type": "input_text", "text": "It is small."}
    reply = respond(templated, input=[ASKED, CALLED, RESULT | {"output": [part, PICTURE]}])
    assert reply.json["kvgraft"]["left_out"] == ["input.output.input_image"]
    told = rendered(templated)["messages"][-1]["content"]
    assert told == "It is small.\n[image left out: the server reads text alone]"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_results_of_chats_are_told_of_in_the_same_way(templated, kind):
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": kind, kind: {}}]}
    asked = [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": [call]}, result]
    reply = templated.chat(*asked)
    assert reply.json["kvgraft"]["left_out"] == [f"messages.content.{kind}"]
    name = {"image_url": "image", "input_audio": "audio", "file": "file"}[kind]
    assert rendered(templated)["messages"][-1]["content"] == f"[{name} left out: the server reads text alone]"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_alone_are_called(templated, mode):
    tools = [FUNCTION, FUNCTION | {"name": "stop"}]
    choice = {
        "type": "allowed_tools",
        "mode": mode,
        "tools": [{"type": "function", "name": "stop"}, {"type": "web_search"}],
    }
    templated.engine.answer = '<tool_call>\n{"name": "stop", "arguments": {"command": "a"}}\n</tool_call>'
    [item] = respond(templated, tools=tools, tool_choice=choice).json["output"]
    assert (item["type"], item["name"]) == ("function_call", "stop")
    assert len(rendered(templated)["tools"]) == 2
    templated.engine.answer = templated.engine.answer.replace("stop", "shell")
    output = respond(templated, tools=tools, tool_choice=choice).json["output"]
    assert mode == "required" or [item["type"] for item in output] == ["message"]


def test_allowed_tools_of_chats_stand_in_an_object_of_their_own(templated):
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    reply = templated.chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert reply.status == 200, reply.body
    source = templated.engine.calls[-1].sampling.structure.source
    assert [f'\\"{name}\\"' in source for name in ("a", "b")] == [False, True]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0].type"),
        ({"input": [ASKED, CALLED, RESULT | {"output": [{"type": []}]}]}, "input[2].output[0].type"),
        ({"input": [{"type": []}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}, ASKED]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}, {"role": "boss", "content": "a"}]}, "input[1].role"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "input": "a"}]}, "input[0].name"),
        ({"input": [{"type": "custom_tool_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [PATCH, FUNCTION], "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice.type"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}},
            "tool_choice.mode",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice.tools",
        ),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
    ],
)
def test_what_contradicts_itself_is_refused(templated, fields, param):
    reply = respond(templated, **fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert templated.engine.prepared == []
