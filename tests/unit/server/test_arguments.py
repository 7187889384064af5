"""What the engine refuses names the field of the body that it came from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from kvgraft.config import EngineConfig
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.request_builder import RequestBuilder
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.errors import ConfigError, ContextLengthError
from kvgraft.models import bundled_model_path

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
WRONG = {"type": "array", "uniqueItems": True}
BODIES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture(scope="module")
def builder():
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=1))
    loaded = SimpleNamespace(
        name="tiny", tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=64, fingerprint="x", model=model
    )
    return RequestBuilder(loaded, EngineConfig(), 64)


@pytest.fixture
def strict(server, builder, monkeypatch):
    """A server whose engine refuses what the real one does."""
    build = server.engine.build

    async def checked(prompt, options):
        builder.build(prompt, options)
        return await build(prompt, options)

    monkeypatch.setattr(server.engine, "build", checked)
    return server


def refused(server, path, fields):
    reply = server.post(path, BODIES[path] | fields)
    assert reply.status == 400, reply.body
    return reply.error["param"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "param"), list(zip(BODIES, ["prompt", "messages", "input"], strict=True)))
def test_a_prompt_that_is_too_long_is_named(strict, path, param, stream):
    long = "word " * 100
    body = {"prompt": long} if "prompt" in BODIES[path] else {"input": long}
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": long}]}
    reply = strict.post(path, body | {"stream": stream})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, "context_length_exceeded")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"kvgraft": {"reuse": "substitute"}}, "kvgraft.reuse"),
        ({"bad_words": ["a\0", ""]}, "bad_words"),
    ],
)
def test_arguments_that_the_engine_refuses_are_named(strict, path, fields, param):
    assert refused(strict, path, fields) == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"structured_outputs": {"json": WRONG}}, "structured_outputs"),
        ("/v1/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("/v1/completions", {"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}},
            "response_format",
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": WRONG}}}, "text.format"),
    ],
)
def test_structures_that_cannot_be_kept_are_named(strict, path, fields, param):
    assert refused(strict, path, fields) == param


def test_schemas_of_numbers_that_json_does_not_have_are_named(server):
    reply = server.post("/v1/completions", b'{"prompt": "a", "structured_outputs": {"json": {"maximum": 1e999}}}')
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs.json")
    schema = b'{"type": "json_schema", "json_schema": {"schema": {"maximum": 1e999}}}'
    reply = server.post("/v1/completions", b'{"prompt": "a", "response_format": ' + schema + b"}")
    assert (reply.status, reply.error["param"]) == (400, "response_format.json_schema.schema")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "text"}}, "tools"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, None),
    ],
)
def test_tools_that_cannot_be_kept_are_named_unless_they_are_one_of_two(strict, fields, param):
    strict.engine.loaded.tokenizer.chat_template = "{{ messages }} {{ tools }}"
    assert refused(strict, "/v1/chat/completions", fields) == param


@pytest.mark.parametrize(
    ("argument", "params"),
    [
        ("max_new_tokens", ["max_tokens", "max_tokens", "max_output_tokens"]),
        ("documents", ["kvgraft.documents"] * 3),
        ("include_stop", ["include_stop_str_in_output"] * 3),
        (None, [None] * 3),
    ],
)
@pytest.mark.parametrize("where", ["build", "stream"])
def test_names_of_the_engine_are_translated(server, monkeypatch, argument, params, where):
    error = ConfigError("it is wrong", argument)

    async def fails(*_args, **_options):
        raise error

    if where == "build":
        monkeypatch.setattr(server.engine, "build", fails)
    else:
        server.engine.failure = error
    assert [refused(server, path, {}) for path in BODIES] == params
    assert error.argument == argument, "others may wait for the same error"


def test_the_engine_says_which_argument_it_means(builder):
    asked = {
        "temperature": lambda: SamplingParams(temperature=-1),
        "stop": lambda: SamplingParams(stop=("",)),
        "prompt": lambda: builder.build([]),
        "selection": lambda: builder.build([2], RequestOptions(selection="nonsense")),
        "correction": lambda: builder.build([2], RequestOptions(correction="nonsense")),
        "repair": lambda: builder.build([2], RequestOptions(repair="nonsense")),
        "reuse": lambda: builder.build([2], RequestOptions(reuse="nonsense")),
        "documents": lambda: builder.build(
            [2], RequestOptions(documents=[SimpleNamespace(document_id="", start=0, stop=1)])
        ),
        "min_tokens": lambda: builder.build([2], RequestOptions(SamplingParams(2, min_tokens=3))),
        "append": lambda: builder.build([2], RequestOptions(append=True)),
        "priority": lambda: builder.build([2], RequestOptions(priority=1.5)),
    }
    for argument, ask in asked.items():
        with pytest.raises(ConfigError) as caught:
            ask()
        assert caught.value.argument == argument
    with pytest.raises(ContextLengthError) as caught:
        builder.build([2] * 64)
    assert caught.value.argument == "prompt"
