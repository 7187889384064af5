"""Tools of chats: what the engine is asked, and what clients get, whole and streamed."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvgraft.http.fields import Fields
from kvgraft.server.tools import parse_tool_use

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "stop"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CLOSED = PARAMETERS | {"additionalProperties": False}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture
def hermes(make_server):
    server = make_server()
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }} <tool_call>"
    server.engine.answer = f"I add.\n\n{CALL}"
    return server


def asked(server):
    """The structure that the last request asked for."""
    structure = server.engine.calls[-1].sampling.structure
    return structure and (structure.kind, json.loads(structure.source))


def streamed(reply):
    """Message and reason that a client puts together of a stream."""
    message, reasons = {"content": None, "tool_calls": []}, []
    for event in reply.events[:-1]:
        choice = ChatCompletionChunk.model_validate(event, strict=True).choices[0]
        if choice.delta.content:
            message["content"] = (message["content"] or "") + choice.delta.content
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.type == "function"
                assert call.index == len(message["tool_calls"])
                message["tool_calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
            message["tool_calls"][call.index]["arguments"] += call.function.arguments
        reasons.append(choice.finish_reason)
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return message, reasons[-1]


def test_calls_stand_in_the_message(hermes):
    choice = ChatCompletion.model_validate(hermes.chat(tools=[TOOL]).json, strict=True).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1}')
    assert asked(hermes) is None


def test_message_of_calls_alone_has_no_content(hermes):
    hermes.engine.answer = CALL
    assert hermes.chat(tools=[TOOL]).json["choices"][0]["message"]["content"] is None


def test_stream_is_put_together_to_the_same(hermes):
    message, reason = streamed(hermes.chat(tools=[TOOL], stream=True))
    assert (message["content"], reason) == ("I add.", "tool_calls")
    [call] = message["tool_calls"]
    assert (call["name"], call["arguments"]) == ("add", '{"a": 1}')
    assert call["id"].startswith("call_")


def test_stream_names_the_role_once_and_reports_at_its_end(hermes):
    hermes.engine.answer = CALL
    *chunks, _ = hermes.chat(tools=[TOOL], stream=True, logprobs=True).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [bool(chunk.get("kvgraft")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(token["token"] for one in told if one for token in one["content"]) == CALL


@pytest.mark.parametrize("answer", ["no call", "half a <tool", '<tool_call>{"name": "add", "arg'])
def test_answer_without_calls_is_text(hermes, answer):
    hermes.engine.answer = answer
    choice = hermes.chat(tools=[TOOL]).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer, "stop")
    assert "tool_calls" not in choice["message"]
    assert streamed(hermes.chat(tools=[TOOL], stream=True)) == ({"content": answer, "tool_calls": []}, "stop")


def test_text_is_read_as_text_where_there_are_no_tools(hermes):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message = hermes.chat(**fields).json["choices"][0]["message"]
        assert message["content"] == hermes.engine.answer


def test_several_choices_have_their_own_calls(hermes):
    choices = hermes.chat(tools=[TOOL], n=2).json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_only_the_first_call_is_told_if_they_are_not_to_be_parallel(hermes):
    hermes.engine.answer = CALL + CALL
    assert len(hermes.chat(tools=[TOOL]).json["choices"][0]["message"]["tool_calls"]) == 2
    one = hermes.chat(tools=[TOOL], parallel_tool_calls=False).json["choices"][0]["message"]
    assert (len(one["tool_calls"]), one["content"]) == (1, None)


def test_named_function_is_forced(hermes):
    hermes.engine.answer = CALL
    choice = {"type": "function", "function": {"name": "add"}}
    reply = hermes.chat(tools=[TOOL, OTHER], tool_choice=choice)
    assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(hermes.engine.calls[-1].prompt)["tools"] == [TOOL, OTHER]
    before, after = '<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>"
    assert asked(hermes) == (
        "parts",
        [{"text": before}, {"schema": CLOSED}, {"text": after}],
    )


def test_required_is_one_or_several_of_all_functions(hermes):
    hermes.chat(tools=[TOOL, OTHER], tool_choice="required")
    kind, [repeated] = asked(hermes)
    assert (kind, repeated["separator"]) == ("parts", "\n")
    [either] = repeated["repeat"]
    assert [sequence[1] for sequence in either["any_of"]] == [
        {"schema": CLOSED},
        {"schema": NOTHING},
    ]
    hermes.chat(tools=[TOOL, OTHER], tool_choice="required", parallel_tool_calls=False)
    assert asked(hermes) == ("parts", [either])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"{CALL}\n{CALL}"),
        ("llama", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}'),
        ("json", '{"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]'),
    ],
)
def test_forced_calls_are_streamed_as_they_are_written(make_server, parser, text):
    server = make_server(tool_parser=parser)
    server.engine.loaded.tokenizer.chat_template = "{{ tools }}"
    server.engine.answer = text
    reply = server.chat(tools=[TOOL], tool_choice="required", stream=True)
    message, reason = streamed(reply)
    assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [("add", '{"a": 1}')] * 2
    assert (message["content"], reason) == (None, "tool_calls")
    pieces = [c for e in reply.events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert len(pieces) > 10
    whole = server.chat(tools=[TOOL], tool_choice="required").json["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in whole["tool_calls"]] == ['{"a": 1}'] * 2


def test_newer_mistral_template_forces_the_newer_form(make_server):
    server = make_server()
    server.engine.loaded.tokenizer.chat_template = "{{ tools }} [TOOL_CALLS] [ARGS]"
    server.chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert asked(server)[1][0] == {"text": "[TOOL_CALLS]add[ARGS]"}


def test_forced_call_that_is_cut_off_is_told_as_far_as_it_goes(hermes):
    hermes.engine.answer = CALL
    choice = {"type": "function", "function": {"name": "add"}}
    cut = len('<tool_call>\n{"name": "add", "arguments": {"a"')
    for stream in (False, True):
        reply = hermes.chat(tools=[TOOL], tool_choice=choice, max_tokens=cut, stream=stream)
        if stream:
            message, reason = streamed(reply)
            assert (message["tool_calls"][0]["arguments"], reason) == ('{"a"', "length")
        else:
            choice_object = reply.json["choices"][0]
            assert choice_object["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'
            assert choice_object["finish_reason"] == "length"


def test_strict_functions_are_held_to_their_schemas_once_a_call_begins(hermes):
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    reply = hermes.chat(tools=[strict], parallel_tool_calls=False)
    assert reply.json["choices"][0]["message"]["content"] == "I add."
    assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
    kind, [free, calls] = asked(hermes)
    assert (kind, free) == ("parts", {"free": {"until": ["<tool_call>"]}})
    assert calls["optional"][1] == {"schema": CLOSED}


def test_answer_of_a_schema_may_be_calls_instead(hermes):
    schema = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    hermes.engine.answer = CALL
    assert hermes.chat(tools=[TOOL], **fields).json["choices"][0]["finish_reason"] == "tool_calls"
    kind, [either] = asked(hermes)
    assert (kind, either["any_of"][1]) == ("parts", [{"schema": schema}])
    hermes.engine.answer = '{"b": "c"}'
    for stream in (False, True):
        reply = hermes.chat(tools=[TOOL], stream=stream, **fields)
        content = streamed(reply)[0]["content"] if stream else reply.json["choices"][0]["message"]["content"]
        assert content == '{"b": "c"}'
    hermes.chat(tools=[TOOL], tool_choice="required", **fields)
    assert "any_of" not in asked(hermes)[1][0]
    refused = hermes.chat(tools=[TOOL], structured_outputs={"regex": "a+"})
    assert (refused.status, refused.error["param"]) == (400, "tools")


def test_special_marks_are_shown_to_the_reader(hermes):
    hermes.chat(tools=[TOOL])
    assert hermes.engine.calls[-1].sampling.skip_special_tokens
    hermes.engine.loaded.tokenizer.all_special_tokens = ["<tool_call>"]
    hermes.chat(tools=[TOOL])
    assert not hermes.engine.calls[-1].sampling.skip_special_tokens
    hermes.chat()
    assert hermes.engine.calls[-1].sampling.skip_special_tokens


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
@pytest.mark.parametrize("parser", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_template_that_ignores_tools_is_400_with_the_remedy(make_server, template, parser, choice):
    server = make_server(tool_parser=parser)
    server.engine.loaded.tokenizer.chat_template = template
    reply = server.chat(tools=[TOOL], tool_choice=choice)
    assert reply.status == 400
    assert reply.error["param"] == "tools"
    assert "without --tool-parser" in reply.error["message"]
    assert server.chat(tools=[TOOL], tool_choice="none").status == 200


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{{ messages }} {# <tool_call> #}"])
@pytest.mark.parametrize("parser", ["auto", "json"])
def test_models_are_told_of_tools_that_their_template_does_not_show(make_server, template, parser):
    server = make_server(tool_parser=parser)
    server.engine.loaded.tokenizer.chat_template = template
    server.engine.answer = '{"name": "add", "arguments": {"a": 1}}'
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = server.chat(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        tools=[TOOL],
    )
    assert reply.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    prompt = server.engine.prepared[-1]
    assert prompt.count("Be brief.") == 1
    for text in ('"name": "add", "parameters"', '{"name": "add", "arguments": {"a": 1}}', "Result of add: 2"):
        assert text in (prompt if template is None else prompt.replace('\\"', '"'))


def test_calls_of_models_that_are_told_of_tools_are_forced_in_bare_json(server):
    server.engine.loaded.tokenizer.chat_template = "{{ messages }} {# <tool_call> #}"
    server.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    kind, [begun, *_] = asked(server)
    assert (kind, begun) == ("parts", {"text": '{"name": "add", "arguments": '})


@pytest.mark.parametrize("template", [None, "{{ messages }} {# tool_calls #}"])
@pytest.mark.parametrize("value", ["[" * 600 + "]" * 600, '"\\ud800"'], ids=["deep", "half a character"])
def test_arguments_that_templates_cannot_take_stay_text(make_server, template, value):
    """They are the model's own words, which come back with the next turn."""
    server = make_server()
    server.engine.loaded.tokenizer.chat_template = template
    arguments = f'{{"a": {value}}}'
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1", "tool_call_id": "c"}]
    assert server.chat(*said).status == 200
    assert value.strip('"') in server.engine.prepared[-1]


@pytest.mark.parametrize("call_id", [["c"], {"c": 1}, 5, True])
def test_an_id_of_a_call_that_is_no_text_is_400(server, call_id):
    call = {"id": call_id, "function": {"name": "add", "arguments": "{}"}}
    reply = server.chat({"role": "assistant", "tool_calls": [call]})
    assert (reply.status, reply.error["param"]) == (400, "messages[0].tool_calls[0].id")


def test_provisional_stream_with_tools_is_400(hermes):
    fields = {"stream": True, "kvgraft": {"reuse": "verified", "provisional": True}}
    assert hermes.chat(tools=[TOOL], **fields).error["param"] == "kvgraft.provisional"
    assert hermes.chat(**fields).status == 200
    assert hermes.chat(tools=[TOOL], stream=True, kvgraft={"reuse": "verified"}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "b"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_field_is_named(hermes, fields, param):
    reply = hermes.chat(**fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert hermes.engine.prepared == []


class CountedName(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other):
        CountedName.num_compared += 1
        return str(self) == str(other)

    __hash__ = str.__hash__


def test_each_of_many_tools_is_looked_at_once():
    """A body has room for 130,000: to compare each with all others kept all clients waiting for minutes."""
    CountedName.num_compared = 0
    use = parse_tool_use(Fields({"tools": [{"function": {"name": CountedName(f"f{n}")}} for n in range(1_000)]}))
    assert len(use.functions) == 1_000
    assert CountedName.num_compared < 10_000
