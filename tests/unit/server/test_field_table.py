"""Every field that clients of OpenAI and of vLLM can send is read, refused or harmless; all others are refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from openai.types.chat import completion_create_params as chat
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from kvgraft.server.body_fields import BODY_FIELDS, SHOWN, Endpoint, Handling
from kvgraft.server.field_table import table_of

VERSIONS = json.loads((Path(__file__).parent / "vllm_fields.json").read_text())
VLLM = {body: {name for lists in VERSIONS.values() for name in lists[body]} for body in VERSIONS["0.33.0"]}
OPENAI = {
    Endpoint.COMPLETIONS: CompletionCreateParamsNonStreaming,
    Endpoint.CHAT: chat.CompletionCreateParamsNonStreaming,
    Endpoint.RESPONSES: ResponseCreateParamsNonStreaming,
}
BODIES = {
    Endpoint.COMPLETIONS: ("/v1/completions", {"prompt": "Say it"}),
    Endpoint.CHAT: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    Endpoint.RESPONSES: ("/v1/responses", {"input": "Hi"}),
    Endpoint.MESSAGES: ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    Endpoint.TOKENIZE: ("/tokenize", {"prompt": "Say it"}),
    Endpoint.DETOKENIZE: ("/detokenize", {"tokens": [97]}),
    Endpoint.SESSIONS: ("/v1/sessions", {}),
}
REFUSED = [
    (endpoint, f)
    for f in BODY_FIELDS
    if f.handling is Handling.REFUSED
    for endpoint in BODIES
    if endpoint in f.endpoints
]


@pytest.mark.parametrize("endpoint", OPENAI)
def test_every_parameter_of_openai_is_in_the_table(endpoint):
    names = set(OPENAI[endpoint].__annotations__)
    assert len(names) > 15
    assert names <= set(table_of(endpoint))


@pytest.mark.parametrize("endpoint", [Endpoint(name) for name in VLLM if name in [*Endpoint]])
def test_every_parameter_of_vllm_is_in_the_table(endpoint):
    assert VLLM[endpoint] <= set(table_of(endpoint))


def test_a_name_stands_once_for_an_endpoint():
    count = Counter((field.name, endpoint) for field in BODY_FIELDS for endpoint in field.endpoints)
    assert max(count.values()) == 1


def test_every_endpoint_that_is_served_is_tested_here():
    assert set(BODIES) == SHOWN


@pytest.mark.parametrize(("endpoint", "field"), REFUSED, ids=lambda value: getattr(value, "name", None))
def test_refused_field_is_named_with_a_remedy(server, endpoint, field):
    path, body = BODIES[endpoint]
    reply = server.post(path, body | {field.name: {"asks": "for something"}})
    assert reply.status == 400
    assert reply.error.get("param") == (None if endpoint is Endpoint.MESSAGES else field.name)
    assert reply.error["message"] == f"{field.name} is not supported by this server; {field.text}"
    assert server.engine.prepared == []


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_fields_that_are_left_out_are_named_in_the_report(server, endpoint):
    path, body = BODIES[endpoint]
    names = [field.name for field in table_of(endpoint).values() if field.handling is Handling.LEFT_OUT]
    reply = server.post(path, body | {name: {"asks": "for something"} for name in names})
    assert reply.json["kvgraft"]["left_out"] == names
    assert names


@pytest.mark.parametrize("endpoint", BODIES)
def test_values_that_ask_for_nothing_pass_and_so_do_harmless_fields(server, endpoint):
    path, body = BODIES[endpoint]
    table = table_of(endpoint).values()
    nothing = {field.name: field.nothing[-1] for field in table if field.nothing}
    harmless = {field.name: "whatever" for field in table if field.handling is Handling.IGNORED}
    null = {field.name: None for field in table if field.name not in body}
    assert server.post(path, null | body | nothing | harmless).status == 200


def test_true_is_not_one_and_zero_is_not_false(server):
    assert server.complete(length_penalty=True).status == 400
    assert server.complete(use_beam_search=0).status == 400


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("temprature", "did you mean 'temperature'?"),
        ("penalty_last_n", "docs/reference/http.md lists the fields; leave it out"),
        ("top_a", "docs/reference/http.md lists the fields; leave it out"),
        ("min_length", "docs/reference/http.md lists the fields; leave it out"),
        ("stop_sequences", "it is one of messages"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("zzz", "docs/reference/http.md lists the fields; leave it out"),
        ("top_logprobs", "it is one of chat, responses"),
        ("x" * 100_000, "docs/reference/http.md lists the fields; leave it out"),
    ],
)
def test_unknown_field_is_refused_with_what_was_meant(server, field, hint):
    reply = server.complete(**{field: 1})
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("unknown_field", field[:60])
    assert reply.error["message"] == f"{field[:60]!r} is no field of completions; {hint}"
    assert server.engine.prepared == []


@pytest.mark.parametrize("call", ["complete", "chat"])
class TestOtherNames:
    def test_of_llama_cpp(self, server, call):
        assert getattr(server, call)(n_predict=3, repeat_penalty=1.3).status == 200
        sampling = server.engine.calls[-1].sampling
        assert (sampling.max_new_tokens, sampling.repetition_penalty) == (3, 1.3)

    @pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
    def test_minus_one_is_as_many_as_fit(self, server, call, name):
        assert getattr(server, call)(**{name: -1}).status == 200
        assert server.engine.calls[-1].sampling.max_new_tokens == 2**31 - 1

    def test_a_request_for_our_vllm_connector(self, server, call):
        assert getattr(server, call)(kv_transfer_params={"kvgraft": "exact"}).status == 200
        assert server.engine.calls[-1].reuse == "exact"
        assert getattr(server, call)(kv_transfer_params={"kvgraft_repair": "before"}).status == 200
        assert server.engine.calls[-1].repair == "before"
        reply = getattr(server, call)(kv_transfer_params={"kvgraft": "words"})
        assert (reply.status, reply.error["param"]) == (400, "kvgraft.reuse")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
            ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
            ({"kv_transfer_params": {"kvgraft": "off"}, "kvgraft": {"reuse": "graft"}}, "kv_transfer_params.kvgraft"),
            ({"kv_transfer_params": {"kvgraft": 1}}, "kv_transfer_params.kvgraft"),
            ({"kv_transfer_params": {"kvgraft_repair": 1}}, "kv_transfer_params.kvgraft_repair"),
            ({"kv_transfer_params": {"kvgraft": "off", "do_remote_decode": True}}, "kv_transfer_params"),
            ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
            ({"max_tokens": -2}, "max_tokens"),
        ],
    )
    def test_contradictions_and_what_is_not_taken(self, server, call, fields, param):
        reply = getattr(server, call)(**fields)
        assert (reply.status, reply.error["param"]) == (400, param)


def test_null_of_an_unknown_field_is_absent(server):
    assert server.complete(zzz=None).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a"}), ("/v1/sessions", {}), ("/v1/chat/completions", {"messages": "x"})],
)
def test_unknown_fields_are_refused_everywhere(server, path, body):
    assert server.post(path, body | {"zzz": 1}).error["code"] == "unknown_field"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kvgraft": {"reus": "off"}}, "kvgraft has the unknown key 'reus'; did you mean 'reuse'?"),
        ({"kvgraft": {"zzz": "off"}}, "kvgraft has the unknown key 'zzz'; known are correction, "),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options has the unknown key 'include_usages'; did you mean 'include_usage'?",
        ),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation is not supported"),
    ],
)
def test_unknown_options_are_refused(server, fields, message):
    assert server.complete(**fields).error["message"].startswith(message)


def test_options_of_streams_are_known():
    options = set(ChatCompletionStreamOptionsParam.__annotations__) | VLLM["stream_options"]
    assert options == {"include_usage", "include_obfuscation", "continuous_usage_stats"}


def test_options_of_streams_that_ask_for_nothing_pass(server):
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False}
    assert server.complete(stream=True, stream_options=options).status == 200


def test_best_of_is_n_or_refused(server):
    assert server.complete(best_of=2, n=2).status == 200
    assert server.complete(best_of=3, n=2).error["param"] == "best_of"
