"""litellm, whose providers `openai/` (chat) and `text-completion-openai/` take any server."""

from __future__ import annotations

import json

import pytest
from tests.clients.served import (
    ELSEWHERE,
    IN_CLIENTS_ENVIRONMENT,
    KEY,
    MODEL,
    document,
    is_weather,
    weather_tool,
)

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)

import litellm
from tests.clients.weather import Weather


def complete(server, content, **fields):
    settings = {"model": f"openai/{MODEL}", "api_base": server.base_url, "api_key": KEY, "temperature": 0}
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return litellm.completion(messages=messages, **settings | {"max_tokens": 8} | fields)


def test_stream_gives_what_a_whole_answer_gives(server):
    whole = complete(server, "import")
    chunks = list(complete(server, "import", stream=True, stream_options={"include_usage": True}))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8


def test_text_completion(server):
    fields = {"model": f"text-completion-openai/{MODEL}", "api_base": server.base_url, "api_key": KEY}
    answer = litellm.text_completion(**fields, prompt="for name in ", max_tokens=3, temperature=0)
    direct = server.post("/v1/completions", prompt="for name in ", max_tokens=3, temperature=0)
    assert answer.choices[0].text == direct["choices"][0]["text"]


def test_moved_text_is_reported(server):
    text = document("litellm")

    def messages(system):
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]

    complete(server, messages("Be brief."))
    moved = complete(server, messages("Say what the functions do, one by one."))
    assert moved.kvgraft["shifted_tokens"] > 100
    assert moved.usage.prompt_tokens_details.cached_tokens == moved.kvgraft["reused_tokens"]
    assert moved.usage.kvgraft["shifted_tokens"] == moved.kvgraft["shifted_tokens"]
    chunks = complete(server, messages("Name them."), stream=True, stream_options={"include_usage": True})
    assert list(chunks)[-1].usage.prompt_tokens_details.cached_tokens > 100


def test_our_options_pass(server):
    answer = complete(server, document("options"), extra_body={"kvgraft": {"reuse": "off"}})
    assert answer.kvgraft["miss"]["reason"] == "reuse_off"


def test_tools_are_called_whole_and_streamed(server):
    fields = {"tools": [weather_tool()], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    (call,) = complete(server, "What is the weather?", **fields).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert is_weather(json.loads(call.function.arguments))
    whole = litellm.stream_chunk_builder(list(complete(server, "What is the weather?", **fields, stream=True)))
    (streamed,) = whole.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("weather", call.function.arguments)


def test_structured_output_is_of_the_schema(server):
    answer = complete(server, "The weather in JSON", response_format=Weather, max_tokens=300)
    assert Weather.model_validate_json(answer.choices[0].message.content)
