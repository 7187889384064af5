"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

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

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tests.clients.weather import Weather


class Note(BaseModel):
    """A remark."""

    text: str = "nothing"


def chat(server, **fields):
    settings = {"model": MODEL, "base_url": server.base_url, "api_key": KEY, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(**settings | {"max_tokens": 8} | fields)


def summed(chunks):
    """One message of all chunks, as LangChain's users add them."""
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first


def test_stream_and_batch_give_what_invoke_gives(server):
    model = chat(server)
    whole = model.invoke("import")
    streamed = summed(model.stream("import", stream_usage=True))
    assert streamed.content == whole.content
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 8
    first, second = model.batch(["import", "class"])
    assert (first.content, second.content) == (whole.content, model.invoke("class").content)


def test_moved_text_is_reported(server):
    text = document("langchain")

    def messages(system):
        return [SystemMessage(system), HumanMessage(text)]

    model = chat(server)
    model.invoke(messages("Be brief."))
    moved = model.invoke(messages("Say what the functions do, one by one."))
    kept = moved.response_metadata["token_usage"]["kvgraft"]
    assert kept["shifted_tokens"] > 100
    assert moved.usage_metadata["input_token_details"]["cache_read"] == kept["reused_tokens"]
    streamed = summed(model.stream(messages("Name them."), stream_usage=True))
    assert streamed.usage_metadata["input_token_details"]["cache_read"] > 100


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Weather, Weather.model_json_schema()], ids=["class", "dict"])
def test_structured_output_is_of_the_schema(server, method, schema):
    found = chat(server, max_tokens=300).with_structured_output(schema, method=method).invoke("The weather in JSON")
    assert Weather.model_validate(found.model_dump() if isinstance(found, BaseModel) else found)
    assert isinstance(found, Weather if schema is Weather else dict)


def test_json_mode_gives_an_object(server):
    (closing,) = server.post("/tokenize", prompt="}", add_special_tokens=False)["tokens"]
    model = chat(server, logit_bias={closing: 100})  # JSON without a schema has no end that a small model would find
    found = model.with_structured_output(Note, method="json_mode", include_raw=True).invoke("A remark in JSON")
    assert (found["parsed"], found["parsing_error"]) == (Note(), None)
    assert found["raw"].response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_bound_tools_are_called_whole_and_streamed(server, choice):
    model = chat(server, max_tokens=200).bind_tools([weather_tool()], tool_choice=choice, parallel_tool_calls=False)
    whole = model.invoke("What is the weather?")
    (call,) = whole.tool_calls
    assert call["name"] == "weather"
    assert is_weather(call["args"])
    (streamed,) = summed(model.stream("What is the weather?")).tool_calls
    assert streamed["args"] == call["args"]
    result = ToolMessage("Rain.", tool_call_id=call["id"])
    answer = chat(server).bind_tools([weather_tool()]).invoke([HumanMessage("What is the weather?"), whole, result])
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 50


def test_responses_endpoint(server):
    model = chat(server, use_responses_api=True)
    whole = model.invoke("import")
    assert summed(model.stream("import")).text == whole.text != ""
    assert model.invoke("import").usage_metadata["input_token_details"]["cache_read"] > 0
