"""LlamaIndex's `OpenAILike`."""

from __future__ import annotations

import pytest
from tests.clients.served import ELSEWHERE, IN_CLIENTS_ENVIRONMENT, KEY, MODEL, document

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from tests.clients.weather import Weather


def weather(day: str) -> str:
    """Tell the weather of a day."""
    return f"It rains {day}."


def model(server, **fields):
    settings = {"model": MODEL, "api_base": server.base_url, "api_key": KEY, "temperature": 0, "max_retries": 0}
    return OpenAILike(**settings | {"max_tokens": 8, "context_window": 8192} | fields)


def test_streams_give_what_whole_answers_give(server):
    completing, chatting = model(server, is_chat_model=False), model(server, is_chat_model=True)
    assert "".join(part.delta for part in completing.stream_complete("import")) == completing.complete("import").text
    messages = [ChatMessage(role="user", content="import")]
    streamed = list(chatting.stream_chat(messages))[-1]
    assert streamed.message.content == chatting.chat(messages).message.content


def test_moved_text_is_reported(server):
    text, completing, chatting = document("llama_index"), *(model(server, is_chat_model=is_chat) for is_chat in (0, 1))
    completing.complete(text)
    moved = completing.complete("# Other words in front.\n" + text).raw
    assert moved.usage.prompt_tokens_details.cached_tokens == moved.model_extra["kvgraft"]["reused_tokens"] > 100
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=text)]
    assert chatting.chat(messages).raw.model_extra["kvgraft"]["shifted_tokens"] > 100
    messages[0] = ChatMessage(role="system", content="Name what is defined.")
    last = list(chatting.stream_chat(messages))[-1].raw
    assert last.model_extra["kvgraft"]["shifted_tokens"] > 100


def test_tools_are_called(server):
    calling = model(server, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    tool = FunctionTool.from_defaults(fn=weather, fn_schema=Weather)
    answer = calling.chat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    (call,) = calling.get_tool_calls_from_response(answer)
    assert (call.tool_name, list(call.tool_kwargs)) == ("weather", ["day"])
    done = calling.predict_and_call([tool], user_msg="What is the weather?", tool_required=True)
    assert done.response == f"It rains {call.tool_kwargs['day']}."


@pytest.mark.parametrize("way", [{"is_function_calling_model": True}, {"should_use_structured_outputs": True}])
def test_structured_output_is_of_the_schema(server, way):
    structured = model(server, is_chat_model=True, max_tokens=300, **way).as_structured_llm(Weather)
    assert structured.complete("The weather in JSON").raw.day in {"today", "tomorrow"}
