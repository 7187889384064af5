"""What holds for every endpoint: bodies, limits, keys, ids, logs, unknown paths."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading

import pytest

from kvgraft.http import body as body_module
from kvgraft.server import given_prompts

JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"prompt": "\xe9"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "x", "prompt": "y"}', "given twice"),
        (b'{"prompt": "x", "a": {"b": 1, "b": 1}}', "given twice"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeply"),
        (b'{"prompt": "x", "metadata": ' + b"[" * 200 + b"]" * 200 + b"}", "at most 200 levels"),
        (b'{"prompt": "x", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", "at most 200 levels"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", "a number has more than 4,300 digits"),
        (b'{"prompt": "x", "seed": -' + b"9" * 5_000 + b"}", "a number has more than 4,300 digits"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
    ],
)
def test_body_that_cannot_be_read_is_400(server, raw, words):
    reply = server.post("/v1/completions", raw)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_json"
    assert words in reply.error["message"]
    assert not [word for word in PYTHON_S_WORDS if word in reply.error["message"]]


PYTHON_S_WORDS = ("set_int_max_str_digits", "utf-8-sig", "recursion", "Exceeds the limit")


@pytest.mark.parametrize("text", ["\ufeff{}", "9" * 5_000, "[" * 100_000, '{"a": NaN}', "{"])
def test_python_s_words_are_in_no_message_about_the_text_of_a_schema(server, text):
    reply = server.complete(structured_outputs={"json": text})
    if reply.status == 400:
        assert reply.error["param"] == "structured_outputs.json"
        assert not [word for word in PYTHON_S_WORDS if word in reply.error["message"]]


@pytest.mark.parametrize("prompt", ["x" * 70_000, [1] * 70_000, [[1] * 70_000]])
def test_what_takes_long_to_read_is_read_beside_the_event_loop(server, monkeypatch, prompt):
    """Other clients are answered meanwhile."""
    threads = []

    def noted(function):
        def call(*arguments):
            threads.append(threading.current_thread())
            return function(*arguments)

        return call

    monkeypatch.setattr(body_module, "parse_object", noted(body_module.parse_object))
    monkeypatch.setattr(given_prompts, "parse_token_ids", noted(given_prompts.parse_token_ids))
    assert server.complete(prompt).error["code"] == "context_length_exceeded"
    assert len(threads) == (1 if isinstance(prompt, str) else 2)
    assert threading.main_thread() not in threads


def test_a_byte_order_mark_is_passed_over(server):
    """Some Windows programs write one in front of UTF-8."""
    assert server.post("/v1/completions", b'\xef\xbb\xbf{"prompt": "x"}').status == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/sessions"]
)
@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"GZIP, deflate"])
def test_compressed_bodies_are_refused_by_name(server, path, encoding):
    headers = [JSON, (b"content-encoding", encoding)]
    reply = server.call("POST", path, headers=headers, body=[gzip.compress(b'{"prompt": "x"}')])
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "identity")
    assert "without compression" in reply.error["message"]


def test_a_body_may_say_that_it_is_not_compressed(server):
    headers = [JSON, (b"content-encoding", b"identity")]
    assert server.call("POST", "/v1/completions", headers=headers, body=[b'{"prompt": "x"}']).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/reset_prefix_cache", "/health", "/nowhere"])
def test_a_body_whose_length_is_said_twice_is_refused(server, path):
    """A proxy that believes the other one takes the rest for another client's request."""
    headers = [JSON, (b"content-length", b"3"), (b"transfer-encoding", b"chunked")]
    reply = server.call("POST", path, headers=headers, body=[b'{"prompt": "x"}'])
    assert (reply.status, reply.headers["connection"], reply.error["code"]) == (400, "close", "ambiguous_length")
    assert (server.engine.num_resets, server.engine.prepared) == (0, [])


def test_number_beyond_float_is_400(server):
    reply = server.post("/v1/completions", b'{"prompt": "x", "temperature": 1e999}')
    assert (reply.status, reply.error["param"]) == (400, "temperature")


def test_many_brackets_side_by_side_are_not_deep(server):
    assert server.complete([[1]] * 100, metadata=[[[]] * 300, {"a": "[" * 300}]).status == 200


def test_surrogate_pairs_are_characters(server):
    assert server.post("/v1/completions", b'{"prompt": "\\ud83d\\ude00"}').status == 200
    assert server.engine.prepared == ["\N{GRINNING FACE}"]


@pytest.mark.parametrize("content_type", [b"text/plain", b"", b"application/x-www-form-urlencoded", b"\xff"])
def test_other_content_type_is_415(server, content_type):
    reply = server.call("POST", "/v1/completions", headers=[(b"content-type", content_type)], body=[b"{}"])
    assert reply.status == 415
    assert "application/json" in reply.error["message"]


def test_content_type_may_have_parameters(server):
    headers = [(b"content-type", b"Application/JSON; charset=utf-8")]
    assert server.call("POST", "/v1/completions", headers=headers, body=[b'{"prompt": "x"}']).status == 200


def test_declared_size_above_the_limit_is_413_before_reading(make_server):
    server = make_server(max_body_bytes=100)
    headers = [JSON, (b"content-length", b"101")]
    reply = server.call("POST", "/v1/completions", headers=headers, body=[None])
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_streamed_size_above_the_limit_is_413(make_server):
    server = make_server(max_body_bytes=100)
    reply = server.call("POST", "/v1/completions", headers=[JSON], body=[b" " * 60, b" " * 60, None])
    assert reply.status == 413


def test_body_in_pieces_is_put_together(server):
    reply = server.call("POST", "/v1/completions", headers=[JSON], body=[b'{"pro', b"", b'mpt": "x"}'])
    assert reply.status == 200


def test_slow_body_is_408(server, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.01)
    reply = server.call("POST", "/v1/completions", headers=[JSON], body=[])
    assert reply.status == 408


def test_client_that_leaves_within_the_body_gets_nothing(server):
    reply = server.call("POST", "/v1/completions", headers=[JSON], body=[b"{", None])
    assert reply.status is None


@pytest.mark.parametrize("path", ["/v2", "/v1/models/", "/v1/completions/", "/v1/models/other", "/../etc", "/é"])
def test_unknown_path_is_404_in_openai_s_form(server, path):
    reply = server.get(path)
    assert reply.status == 404
    assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("DELETE", "/health"), ("BREW", "/")])
def test_wrong_method_is_405(server, method, path):
    reply = server.call(method, path)
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert "allow" in reply.headers


def bearer(key):
    return [(b"authorization", b"Bearer " + key)]


class TestKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            [],
            bearer(b""),
            bearer(b"wrong"),
            bearer(b"first-key2"),
            bearer(b"first-ke\xff"),
            [(b"authorization", b"first-key")],
            [(b"authorization", b"Basic first-key")],
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/models", "/", "/nowhere", "/tokenize"])
    def test_without_a_valid_key_everything_is_401(self, make_server, headers, path):
        reply = make_server(api_key="first-key,second").get(path, headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("key", [b"first-key", b"second"])
    def test_each_key_opens(self, make_server, key):
        assert make_server(api_key=["first-key", "second"]).get("/v1/models", headers=bearer(key)).status == 200

    @pytest.mark.parametrize("path", ["/health", "/metrics"])
    def test_probes_need_no_key(self, make_server, path):
        assert make_server(api_key="k").get(path).status == 200


def test_request_id_is_taken_over(server):
    assert (
        server.get("/v1/models", headers=[(b"x-request-id", b"abc-1.2:3_4")]).headers["x-request-id"] == "abc-1.2:3_4"
    )


@pytest.mark.parametrize("bad", [b"", b"a b", b"x" * 129, b"a\xe9", b'"quoted"'])
def test_request_id_that_could_do_harm_is_replaced(server, bad):
    given = server.get("/v1/models", headers=[(b"x-request-id", bad)]).headers["x-request-id"]
    assert len(given) == 32
    assert given.isalnum()


def records(caplog):
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


def test_log_line_says_what_a_request_cost(server, caplog):
    caplog.set_level(logging.INFO, "kvgraft")
    server.post("/v1/completions", {"prompt": "secret text"}, headers=[(b"x-request-id", b"mine")])
    (fields,) = records(caplog)
    assert fields["request_id"] == "mine"
    assert (fields["status"], fields["path"], fields["prompt_tokens"], fields["output_tokens"]) == (
        200,
        "/v1/completions",
        11,
        5,
    )
    assert (fields["exact_tokens"], fields["continued_tokens"], fields["shifted_tokens"]) == (1, 0, 0)
    assert fields["finish"] == "stop"
    assert fields["ttft_ms"] == pytest.approx(10)
    assert "secret" not in caplog.text
    assert "hello" not in json.dumps(fields)


def test_log_line_of_an_error_says_what_was_wrong(server, caplog):
    caplog.set_level(logging.INFO, "kvgraft")
    server.complete(max_tokens=0)
    (fields,) = records(caplog)
    assert fields["status"] == 400
    assert "max_tokens" in fields["error"]


def test_probes_are_not_logged(server, caplog):
    caplog.set_level(logging.INFO, "kvgraft")
    server.get("/health")
    assert records(caplog) == []


def test_keys_are_not_logged(make_server, caplog):
    caplog.set_level(logging.DEBUG)
    make_server(api_key="hidden-key").get("/v1/models", headers=bearer(b"hidden-key-wrong"))
    assert "hidden-key" not in caplog.text + json.dumps(records(caplog))


def test_closing_the_app_closes_the_engine(server):
    async def run():
        messages = asyncio.Queue()
        await messages.put({"type": "lifespan.startup"})
        await messages.put({"type": "lifespan.shutdown"})
        sent = []

        async def send(message):
            sent.append(message["type"])

        await server.app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, messages.get, send)
        return sent

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert server.engine.closed_with == [0.0]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/embeddings", "an embedding model"),
        ("/v1/images/generations", "answers in text"),
        ("/v1/files", "keeps no"),
        ("/v1/fine_tuning/jobs", "does not train"),
    ],
)
def test_endpoints_of_openai_that_are_not_there_say_what_to_use(server, path, hint):
    reply = server.post(path, {"input": "x"})
    assert (reply.status, reply.error["code"]) == (404, "endpoint_not_supported")
    assert path.split("/")[2] in reply.error["message"]
    assert hint in reply.error["message"]


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddingz", "/v1"])
def test_other_paths_are_just_unknown(server, path):
    assert server.post(path, {}).error["code"] == "not_found"


def test_a_target_may_be_a_whole_address(server):
    """As a client sends it that takes the server for its proxy (RFC 9112, section 3.2.2)."""
    scope_path = "http://127.0.0.1:8000/v1/models"
    assert server.get(scope_path).json["object"] == "list"
    assert server.get("http://127.0.0.1:8000").json["name"] == "kvgraft"
    assert server.get("http://127.0.0.1:8000/nothing").status == 404
    assert server.get("http://evil.example/v1/models", headers=[(b"host", b"127.0.0.1:8000")]).status == 403
