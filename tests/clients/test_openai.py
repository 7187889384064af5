"""The `openai` client."""

from __future__ import annotations

import json

import pytest
from tests.clients.served import (
    ELSEWHERE,
    IN_CLIENTS_ENVIRONMENT,
    KEY,
    MODEL,
    PATIENCE_S,
    document,
    is_weather,
    weather_tool,
)

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)

import openai
from tests.clients.weather import Weather

GREEDY = {"model": MODEL, "temperature": 0}
ASKED = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


class TestCompletions:
    def test_whole_and_streamed_answers_are_the_same(self, client):
        fields = {**GREEDY, "prompt": "for name in ", "max_tokens": 12}
        whole = client.completions.create(**fields)
        chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12

    def test_moved_text_is_reported(self, client):
        text = document("completions")
        client.completions.create(**GREEDY, prompt=text, max_tokens=1)
        moved = client.completions.create(**GREEDY, prompt="# Other words in front.\n" + text, max_tokens=1)
        report = moved.model_extra["kvgraft"]
        assert report["shifted_tokens"] > 100
        assert moved.usage.prompt_tokens_details.cached_tokens == report["reused_tokens"]


class TestChat:
    def test_whole_and_streamed_answers_are_the_same(self, client):
        fields = {**GREEDY, "messages": [{"role": "user", "content": "import"}], "max_tokens": 8}
        whole = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

    def test_moved_text_is_reported_whole_and_at_the_end_of_a_stream(self, client):
        text = document("chat")

        def messages(system):
            return [{"role": "system", "content": system}, {"role": "user", "content": text}]

        fields = {**GREEDY, "max_tokens": 2}
        client.chat.completions.create(**fields, messages=messages("Be brief."))
        moved = client.chat.completions.create(**fields, messages=messages("Say what the functions do, one by one."))
        assert moved.model_extra["kvgraft"]["shifted_tokens"] > 100
        assert moved.usage.prompt_tokens_details.cached_tokens == moved.model_extra["kvgraft"]["reused_tokens"]
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last, usage = client.chat.completions.create(**fields, messages=messages("Name them."), **asked)
        assert last.model_extra["kvgraft"]["shifted_tokens"] > 100
        assert usage.usage.prompt_tokens_details.cached_tokens == last.model_extra["kvgraft"]["reused_tokens"]


class TestTools:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_a_call_is_forced_whole_and_streamed(self, client, choice):
        fields = {**GREEDY, "messages": ASKED, "tools": [weather_tool()], "tool_choice": choice, "max_tokens": 200}
        fields["parallel_tool_calls"] = False
        whole = client.chat.completions.create(**fields).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.type, call.function.name, whole.message.content) == ("function", "weather", None)
        assert whole.finish_reason == "tool_calls"
        assert is_weather(json.loads(call.function.arguments))
        with client.chat.completions.stream(**fields) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments
        assert streamed.id.startswith("call_")

    def test_results_go_back_into_the_conversation(self, client):
        fields = {**GREEDY, "tools": [weather_tool()], "parallel_tool_calls": False, "max_tokens": 200}
        asked = client.chat.completions.create(**fields, messages=ASKED, tool_choice="required").choices[0].message
        result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "Rain."}
        answer = client.chat.completions.create(**fields, messages=[*ASKED, asked, result])
        assert answer.choices[0].finish_reason in {"stop", "length", "tool_calls"}
        assert answer.usage.prompt_tokens_details.cached_tokens > 50


class TestStructure:
    def test_parse_gives_an_object_of_the_schema(self, client):
        answer = client.chat.completions.parse(**GREEDY, messages=ASKED, response_format=Weather, max_tokens=300)
        assert answer.choices[0].message.parsed.day in {"today", "tomorrow"}

    def test_choice_of_vllm_s_form(self, client):
        options = {"structured_outputs": {"choice": ["sunny", "rainy"]}}
        answer = client.completions.create(**GREEDY, prompt="The weather is ", max_tokens=20, extra_body=options)
        assert answer.choices[0].text in {"sunny", "rainy"}


class TestResponses:
    def test_whole_and_streamed_answers_are_the_same(self, client):
        fields = {**GREEDY, "input": "import", "max_output_tokens": 8}
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            events = list(stream)
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text != ""
        assert (events[0].type, events[-1].type) == (
            "response.created",
            "response.incomplete",
        )  # cut by the token limit
        assert events[-1].response.output_text == whole.output_text

    def test_moved_text_is_reported(self, client):
        fields, text = {**GREEDY, "max_output_tokens": 2}, document("responses")
        client.responses.create(**fields, instructions="Be brief.", input=text)
        moved = client.responses.create(**fields, instructions="Say what the functions do, one by one.", input=text)
        assert moved.usage.input_tokens_details.cached_tokens > 100
        assert moved.model_extra["kvgraft"]["shifted_tokens"] > 100

    def test_a_call_is_forced(self, client):
        function = weather_tool()["function"]
        answer = client.responses.create(
            **GREEDY,
            input="What is the weather?",
            tools=[{"type": "function", **function}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=200,
        )
        (call,) = answer.output
        assert (call.type, call.name) == ("function_call", "weather")
        assert is_weather(json.loads(call.arguments))

    def test_parse_gives_an_object_of_the_schema(self, client):
        answer = client.responses.parse(**GREEDY, input="The weather?", text_format=Weather, max_output_tokens=300)
        assert answer.output_parsed.day in {"today", "tomorrow"}


class TestErrors:
    def test_they_are_the_client_s_own_classes(self, client):
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=3)
        assert wrong.value.param == "temperature"

    def test_a_prompt_that_does_not_fit_has_openai_s_code(self, client):
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model=MODEL, prompt=[5] * 17_000)
        assert long.value.code == "context_length_exceeded"

    def test_a_field_that_nobody_knows_is_named(self, client):
        with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as unknown:
            client.completions.create(model=MODEL, prompt="x", extra_body={"temprature": 1})
        assert unknown.value.param == "temprature"


def test_raw_headers_carry_the_request_s_id_and_what_was_reused(client):
    text = document("headers")
    client.completions.create(**GREEDY, prompt=text, max_tokens=1)
    raw = client.completions.with_raw_response.create(
        **GREEDY, prompt="# Other words.\n" + text, max_tokens=1, extra_headers={"X-Request-Id": "look-for-me"}
    )
    assert raw.headers["x-request-id"] == "look-for-me"
    told = dict(part.split("=") for part in raw.headers["x-kvgraft-report"].split(", "))
    answer = raw.parse()
    assert int(told["shifted"]) == answer.model_extra["kvgraft"]["shifted_tokens"] > 100
    assert int(told["reused"]) == answer.usage.prompt_tokens_details.cached_tokens
