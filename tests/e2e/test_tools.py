"""Tools against a server process: calls that a model that knows nothing of tools is held to."""

from __future__ import annotations

import json
import shutil

import openai
import pytest
from tests.e2e.test_server import Process

from kvgraft.models import bundled_model_path

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{# calls look like <tool_call> #}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
LEVELS = {
    "type": "object",
    "properties": {"level": {"enum": ["low", "high"]}},
    "required": ["level"],
    "additionalProperties": False,
}
SET = {"type": "function", "function": {"name": "set_level", "parameters": LEVELS}}
ASK = {"type": "function", "function": {"name": "ask"}}
MESSAGES = [{"role": "user", "content": "def level(self):\n    return self._level\n" * 20}]
VERIFIED = {"kvgraft": {"reuse": "verified"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = tmp_path_factory.mktemp("models") / "caller"
    shutil.copytree(bundled_model_path(), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    process = Process("--model", str(model), "--shutdown-grace-s", "1", "--max-model-len", "2048")
    with process.client(key="none") as client:
        yield client
    process.close()


def chat(client, **fields):
    fields = {"messages": MESSAGES, "tools": [SET, ASK], "max_tokens": 100, "temperature": 0, "seed": 1} | fields
    return client.chat.completions.create(model="caller", **fields)


@pytest.mark.parametrize("reuse", ["off", "graft", "verified"])
def test_named_function_is_called(client, reuse):
    choice = {"type": "function", "function": {"name": "set_level"}}
    answer = chat(client, tool_choice=choice, extra_body={"kvgraft": {"reuse": reuse}}).choices[0]
    [call] = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "set_level")
    assert json.loads(call.function.arguments)["level"] in ("low", "high")


def test_required_calls_are_streamed_and_add_up_to_the_whole_answer(client):
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    [whole] = chat(client, **fields).choices[0].message.tool_calls
    name, arguments, reasons = "", "", []
    for chunk in chat(client, stream=True, **fields):
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or ():
            name, arguments = name + (call.function.name or ""), arguments + call.function.arguments
        reasons.append(choice.finish_reason)
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert reasons[-1] == "tool_calls"


def test_every_choice_calls_whatever_is_drawn(client):
    answer = chat(client, tool_choice="required", parallel_tool_calls=False, n=8, temperature=2.0)
    for choice in answer.choices:
        [call] = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "ask" else arguments["level"] in ("low", "high")


def test_strict_tools_leave_answers_free(client):
    strict = [{"type": "function", "function": SET["function"] | {"strict": True}}]
    answer = chat(client, tools=strict, max_tokens=20).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.content == chat(client, max_tokens=20).choices[0].message.content


def test_verified_calls_are_those_of_a_full_prefill(client):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    full = chat(client, extra_body={"kvgraft": {"reuse": "off"}}, **fields).choices[0].message.tool_calls
    told = chat(client, extra_body=VERIFIED, **fields).choices[0].message.tool_calls
    assert [call.function for call in told] == [call.function for call in full]


READ = "def level(self, name):\n    return self._levels[name]\n" * 12
WORDS = {"type": "object", "properties": {"word": {"enum": ["🦊🦉 né", "漢字🎉", "👩‍👩‍👧"]}}, "required": ["word"]}
KINDS = {
    "tools": {"tool_choice": "required", "parallel_tool_calls": False},
    "several calls": {"tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 40},
    "named": {"tool_choice": {"type": "function", "function": {"name": "set_level"}}},
    "stop": {"tools": openai.NOT_GIVEN, "stop": ["return", "self"], "max_tokens": 20},
    "logprobs": {"tools": openai.NOT_GIVEN, "logprobs": True, "top_logprobs": 2, "max_tokens": 12},
    "emoji": {
        "tools": openai.NOT_GIVEN,
        "response_format": {"type": "json_schema", "json_schema": {"name": "word", "strict": True, "schema": WORDS}},
    },
}


def whole(choice):
    """What a client reads of an answer, but for ids of calls."""
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    logprobs = [each.token for each in choice.logprobs.content] if choice.logprobs else []
    return choice.message.content or "", calls, logprobs, choice.finish_reason


def joined(chunks):
    """The same of a stream. Type, name and id come once per call, and nothing comes behind the reason."""
    text, calls, logprobs, reasons = "", {}, [], []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        assert not reasons
        text += choice.delta.content or ""
        logprobs += [each.token for each in choice.logprobs.content] if choice.logprobs else []
        for call in choice.delta.tool_calls or ():
            found = calls.setdefault(call.index, {"type": [], "name": [], "id": [], "arguments": ""})
            for name, value in [("type", call.type), ("name", call.function.name), ("id", call.id)]:
                found[name] += [] if value is None else [value]
            found["arguments"] += call.function.arguments or ""
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    assert all(len(call[name]) == 1 for call in calls.values() for name in ("type", "name", "id"))
    (reason,) = reasons
    return text, [(*call["type"], *call["name"], call["arguments"]) for call in calls.values()], logprobs, reason


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_several_tokens_at_once_lose_nothing(client, kind):
    """vllm#37071, #31501, #44098, #35705: steps that emit several tokens lose arguments, or repeat id, type and name.

    Here drafts of `verified` come in bursts, and what a stream adds up to is the answer of a full prefill.
    """
    drafted, message = 0, {"role": "user", "content": READ}
    client.chat.completions.create(model="caller", messages=[message], max_tokens=1)
    for number in range(2):
        messages = [{"role": "user", "content": f"# {number * 7919} {kind}\n{READ}"}]
        fields = {"messages": messages, "temperature": 0.8, "seed": number} | KINDS[kind]
        full = chat(client, extra_body={"kvgraft": {"reuse": "off"}, "cache_salt": "off"}, **fields).choices[0]
        chunks = list(chat(client, extra_body=VERIFIED, stream=True, **fields))
        assert joined(chunks) == whole(full)
        healing = next(report["healing"] for chunk in chunks if (report := (chunk.model_extra or {}).get("kvgraft")))
        drafted += healing["drafted_tokens"] if healing else 0
    assert drafted


def test_responses_call_and_answer_in_a_schema(client):
    tool = {"type": "function", **SET["function"], "strict": True}
    with client.responses.stream(
        model="caller", input="level", tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        [call] = stream.get_final_response().output
    assert json.loads(call.arguments)["level"] in ("low", "high")
    told = {"format": {"type": "json_schema", "name": "level", "schema": LEVELS}}
    answer = client.responses.create(model="caller", input="level", text=told, temperature=0)
    assert json.loads(answer.output_text)["level"] in ("low", "high")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
