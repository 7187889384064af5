"""What bodies say about sessions, and what the API answers."""

from __future__ import annotations

import pytest

from kvgraft.errors import OverloadedError, SessionInUseError, UnknownSessionError

KEYS = {name: [(b"authorization", f"Bearer {name}".encode())] for name in ("one", "two")}


def test_a_session_is_opened_and_closed(server):
    reply = server.post("/v1/sessions", {"id": "s", "ttl_s": 5, "cache_salt": "mine"})
    assert reply.status == 200
    assert reply.json | {"created": 0} == {"id": "s", "object": "session", "created": 0, "ttl_s": 5}
    assert server.engine.sessions == [("s", 5, "mine", "")]
    assert server.call("DELETE", "/v1/sessions/s").status == 404
    reply = server.call("DELETE", "/v1/sessions/s?cache_salt=mine")
    assert reply.json == {"id": "s", "object": "session", "deleted": True}
    assert not server.engine.sessions


def test_ids_and_times_are_optional(server):
    assert server.post("/v1/sessions", {}).json["id"] == "made-up"
    assert server.engine.sessions == [("", None, "", "")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": "a b"}, "id"),
        ({"id": ""}, "id"),
        ({"id": 3}, "id"),
        ({"id": "x" * 129}, "id"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 601}, "ttl_s"),
        ({"ttl_s": True}, "ttl_s"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"model": "another"}, "model"),
    ],
)
def test_wrong_fields_are_named(server, fields, param):
    reply = server.post("/v1/sessions", fields)
    assert reply.status == (404 if param == "model" else 400)
    assert reply.error["param"] == param
    assert not server.engine.sessions


def test_completions_append_and_chats_send_all(server):
    server.complete(session_id="s")
    server.chat(session_id="s")
    server.complete()
    first, second, third = server.engine.calls
    assert (first.session_id, first.append, first.owner) == ("s", True, "")
    assert (second.session_id, second.append, second.owner) == ("s", False, "")
    assert third.session_id is None


def test_a_session_belongs_to_a_key(make_server):
    server = make_server(api_key=["one", "two"])
    for name, headers in KEYS.items():
        server.post("/v1/sessions", {"id": name}, headers=headers)
        server.post("/v1/completions", {"prompt": "x", "session_id": name}, headers=headers)
    owners = [session[3] for session in server.engine.sessions]
    assert owners == [call.owner for call in server.engine.calls]
    assert len({*owners, ""}) == 3
    assert not {"one", "two"} & {*owners}
    assert server.call("DELETE", "/v1/sessions/one", headers=KEYS["two"]).status == 404
    assert server.call("DELETE", "/v1/sessions/one").status == 401
    assert server.call("DELETE", "/v1/sessions/one", headers=KEYS["one"]).status == 200


def test_without_keys_everybody_is_one_owner(server):
    server.post("/v1/sessions", {"id": "s"}, headers=KEYS["one"])
    assert server.call("DELETE", "/v1/sessions/s", headers=KEYS["two"]).status == 200


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_one_answer_at_a_time(server, fields):
    reply = server.post("/v1/completions", {"prompt": "a", "session_id": "s"} | fields)
    assert (reply.status, reply.error["param"]) == (400, "session_id")
    assert server.chat(session_id="s", n=2).error["param"] == "session_id"


@pytest.mark.parametrize("session_id", ["a b", "", 3, ["s"]])
def test_wrong_ids_are_named(server, session_id):
    reply = server.complete(session_id=session_id)
    assert (reply.status, reply.error["param"]) == (400, "session_id")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (UnknownSessionError("no such session"), 404, "session_not_found"),
        (SessionInUseError("a turn is not done"), 409, "session_in_use"),
        (OverloadedError("too many sessions"), 429, "overloaded"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_of_sessions(server, failure, status, code, stream):
    server.engine.failure = failure
    reply = server.complete(session_id="s", stream=stream)
    assert (reply.status, reply.error["code"], reply.error["message"]) == (status, code, str(failure))


def test_responses_are_counted_by_route(server):
    server.call("DELETE", "/v1/sessions/anything-a-client-made-up")
    exposition = server.metrics.exposition().decode()
    assert 'endpoint="/v1/sessions/{id}"' in exposition
    assert "made-up" not in exposition


def test_health_and_metrics_tell_of_sessions(server):
    assert server.get("/health").json["sessions"] == {"open": 2, "kept_slots": 30}
    exposition = server.get("/metrics").body.decode()
    assert 'kvgraft:sessions{model_name="fake"} 2.0' in exposition
    assert 'kvgraft:session_kv_slots{model_name="fake"} 30.0' in exposition
    assert 'kvgraft:prefix_host_tokens{model_name="fake"} 9.0' in exposition
