"""The command line `llm`, which lies in a folder of its own: it needs another version of the openai client."""

from __future__ import annotations

import json
from functools import partial

import pytest
from tests.clients.llm_command import run_llm
from tests.clients.served import ELSEWHERE, IN_CLIENTS_ENVIRONMENT, KEY, MODEL, document

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)


@pytest.fixture(scope="module")
def llm(server, tmp_path_factory):
    """Run `llm` with a user's folder that names the server; returns what it prints."""
    folder = tmp_path_factory.mktemp("llm")
    models = [
        {"model_id": "ours", "model_name": MODEL, "supports_schema": True, "supports_tools": True},
        {"model_id": "ours-text", "model_name": MODEL, "completion": True},
    ]
    shared = {"api_base": server.base_url, "api_key_name": "ours"}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model | shared for model in models]))
    (folder / "keys.json").write_text(json.dumps({"ours": KEY}))
    return partial(run_llm, folder)


def last_response(llm):
    """What `llm` has kept of the last answer."""
    return json.loads(llm("logs", "list", "-n", "1", "--json"))[0]


def test_stream_prints_what_a_whole_answer_prints(llm):
    options = ("-m", "ours", "import", "-o", "temperature", "0", "-o", "max_tokens", "8")
    whole = llm(*options, "--no-stream")
    assert whole.strip()
    assert llm(*options) == whole


def test_text_completion(llm, server):
    printed = llm("-m", "ours-text", "for name in ", "-o", "temperature", "0", "-o", "max_tokens", "5")
    direct = server.post("/v1/completions", prompt="for name in ", max_tokens=5, temperature=0)
    assert printed.strip() == direct["choices"][0]["text"].strip()


def test_moved_text_is_reported(llm):
    text, options = document("llm"), ("-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "2")
    llm(*options, "--no-stream", "-s", "Be brief.", text)
    llm(*options, "--no-stream", "-s", "Say what the functions do, one by one.", text)
    kept = last_response(llm)
    assert kept["response_json"]["kvgraft"]["shifted_tokens"] > 100, kept
    llm(*options, "-s", "Name them.", text)
    assert json.loads(last_response(llm)["token_details"])["prompt_tokens_details"]["cached_tokens"] > 100


def test_schema(llm):
    schema = {"type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}}, "required": ["day"]}
    schema["additionalProperties"] = False
    options = ("-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "300", "--no-stream")
    assert json.loads(llm(*options, "--schema", json.dumps(schema), "The weather in JSON"))["day"] in {
        "today",
        "tomorrow",
    }
