"""`reuse="verified"` over HTTP: who may ask for provisional tokens, what a stream says of them, what is counted."""

from __future__ import annotations

import pytest

from kvgraft.types import DonorId, Fidelity, HealingReport, SpanReport

SPAN = SpanReport(2, 50, DonorId(1), 10, -10, Fidelity.SHIFTED, 1)
HEALING = HealingReport((SPAN,), 48, 4, 2, 0.011, 0.05, 0.04)
VERIFIED = {"reuse": "verified"}
PROVISIONAL = {"reuse": "verified", "provisional": True}


def apply(chunks, read, index=0):
    """The text that a client has in the end which does as the events tell it."""
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            told = choice.get("kvgraft") or chunk.get("kvgraft") or {}
            if "retract" in told:
                assert chunk["object"] == "kvgraft.retract"
                text = text[: len(text) - told["retract"]["characters"]]
            text += read(choice)
    return text


def text_of(choice):
    return choice["text"]


def content_of(choice):
    return choice["delta"].get("content", "")


@pytest.mark.parametrize("ask", ["complete", "chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_verified_reaches_the_engine_and_sends_verified_tokens_alone_by_default(server, ask, stream):
    assert getattr(server, ask)(stream=stream, kvgraft=VERIFIED).status == 200
    call = server.engine.calls[0]
    assert (call.reuse, call.provisional) == ("verified", False)


def test_verified_can_be_the_default(make_server):
    server = make_server(reuse="verified")
    server.complete(stream=True, kvgraft={"provisional": True})
    server.complete()
    assert [(call.reuse, call.provisional) for call in server.engine.calls] == [("verified", True), ("verified", False)]


@pytest.mark.parametrize(
    "fields",
    [
        {"kvgraft": PROVISIONAL},
        {"kvgraft": PROVISIONAL, "stream": False},
        {"kvgraft": {"provisional": True}, "stream": True},
        {"kvgraft": {"provisional": True, "reuse": "exact"}, "stream": True},
    ],
)
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_provisional_tokens_elsewhere_are_a_400_that_names_the_remedy(server, ask, fields):
    reply = getattr(server, ask)(**fields)
    assert (reply.status, reply.error["param"]) == (400, "kvgraft.provisional")
    for word in ("'verified'", "stream", "leave it out"):
        assert word in reply.error["message"]
    assert not server.engine.calls


def test_provisional_is_true_or_false(server):
    reply = server.complete(stream=True, kvgraft={"reuse": "verified", "provisional": "yes"})
    assert (reply.status, reply.error["param"]) == (400, "kvgraft.provisional")


def test_false_asks_for_nothing(server):
    assert server.complete(kvgraft={"reuse": "exact", "provisional": False}).status == 200


def test_wrong_drafts_are_taken_back_and_right_ones_not_sent_twice(server):
    server.engine.drafts = "heXY"
    *chunks, done = server.complete(stream=True, kvgraft=PROVISIONAL).events
    assert done == "[DONE]"
    told = [(chunk["object"], chunk["choices"][0]["text"], chunk.get("kvgraft")) for chunk in chunks[:-1]]
    assert told == [
        *(("text_completion", letter, {"provisional": True}) for letter in "heXY"),
        ("kvgraft.retract", "", {"retract": {"characters": 2, "tokens": 2}}),
        ("text_completion", "l", None),
        ("text_completion", "l", None),
    ]
    assert chunks[-1]["choices"] == [{"index": 0, "text": "o", "logprobs": None, "finish_reason": "stop"}]
    assert apply(chunks, text_of) == "hello"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_in_a_chat_the_first_provisional_chunk_names_the_role(server):
    server.engine.drafts = "hX"
    *chunks, _ = server.chat(stream=True, kvgraft=PROVISIONAL).events
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "h"}
    retraction = next(chunk for chunk in chunks if chunk["object"] == "kvgraft.retract")
    assert retraction["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert apply(chunks, content_of) == "hello"


def test_an_answer_that_was_drafted_in_full_ends_with_an_empty_chunk(server):
    server.engine.drafts = "hello"
    *chunks, _ = server.complete(stream=True, kvgraft=PROVISIONAL).events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [*"hello", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


def test_an_answer_that_ends_before_its_drafts_do_takes_the_others_back(server):
    server.engine.drafts = "hello"
    *chunks, _ = server.complete(stream=True, max_tokens=3, kvgraft=PROVISIONAL).events
    assert chunks[-2]["kvgraft"] == {"retract": {"characters": 2, "tokens": 2}}
    assert chunks[-2]["choices"][0]["finish_reason"] is None
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert apply(chunks, text_of) == "hel"


def test_each_of_several_choices_carries_its_own_marks(server):
    server.engine.drafts = "heXY"
    *chunks, usage, _ = server.complete(
        ["one", "other"], n=2, stream=True, stream_options={"include_usage": True}, kvgraft=PROVISIONAL
    ).events
    assert [apply(chunks, text_of, index) for index in range(4)] == ["hello"] * 4
    assert not any("kvgraft" in chunk for chunk in chunks)
    assert all("usage" in chunk for chunk in chunks)
    assert sum(chunk["object"] == "kvgraft.retract" for chunk in chunks) == 4
    assert usage["usage"]["completion_tokens"] == 4 * 5


def test_log_probabilities_are_those_of_verified_tokens(server):
    server.engine.drafts = "heXY"
    *chunks, _ = server.complete(stream=True, logprobs=0, kvgraft=PROVISIONAL).events
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    assert [token for one in told for token in one["tokens"]] == list("hello")
    assert [offset for one in told for offset in one["text_offset"]] == list(range(5))
    assert all(choice["logprobs"] is None for choice in choices[:4])
    assert apply(chunks, text_of) == "hello"


def test_a_failure_behind_drafts_is_an_event(server):
    server.engine.drafts, server.engine.failure = "he", ZeroDivisionError("surprise")
    server.engine.fail_at = 1
    *_, last = server.complete(stream=True, kvgraft=PROVISIONAL).events
    assert last["error"]["type"] == "server_error"


def test_a_client_that_leaves_amid_drafts_cancels_its_request(server):
    server.engine.drafts, server.engine.hold_at = "heXY", 1
    body = {"prompt": "x", "stream": True, "kvgraft": PROVISIONAL}
    reply = server.post("/v1/completions", body, leave_after=2)
    assert not reply.ended
    assert len(server.engine.cancelled) == 1


def test_the_report_tells_how_the_answer_was_healed(server):
    assert server.complete().json["kvgraft"]["healing"] is None
    server.engine.healing = HEALING
    told = server.complete(kvgraft=VERIFIED).json["kvgraft"]["healing"]
    assert told.pop("spans")[0]["generation"] == 1
    assert told == {
        "healed_tokens": 48,
        "drafted_tokens": 4,
        "retracted_tokens": 2,
        "first_provisional_ms": pytest.approx(11),
        "first_verified_ms": pytest.approx(50),
        "healed_at_ms": pytest.approx(40),
    }


def test_the_log_line_counts_drafts_of_all_choices(server, caplog):
    caplog.set_level("INFO", "kvgraft.http.access_log")
    server.complete()
    server.engine.healing = HEALING
    server.complete(["one", "other"], kvgraft=VERIFIED)
    plain, verified = (record.fields for record in caplog.records if record.name == "kvgraft.http.access_log")
    assert plain["drafted_tokens"] is plain["retracted_tokens"] is None
    assert (verified["drafted_tokens"], verified["retracted_tokens"]) == (8, 4)
