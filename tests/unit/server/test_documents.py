"""Names of documents in bodies: what they become for the engine, and what is refused."""

from __future__ import annotations

import threading

import pytest

from kvgraft.server import document_fields


def labels(server):
    return [(label.document_id, label.start, label.stop) for label in server.engine.calls[-1].documents]


def asked(*documents):
    return {"kvgraft": {"documents": list(documents)}}


def test_a_text_is_named_wherever_it_stands(server):
    server.complete("ab cd ab", **asked({"id": "x", "text": "ab"}, {"id": "y", "range": [3, 5]}))
    assert labels(server) == [("x", 0, 2), ("x", 6, 8), ("y", 3, 5)]


def test_ranges_of_token_ids_count_tokens(server):
    server.complete([5, 6, 7], **asked({"id": "x", "range": [1, 3]}))
    assert labels(server) == [("x", 1, 3)]


def test_further_choices_have_the_same_names(server):
    server.complete("abcd", n=2, **asked({"id": "x", "text": "bc"}))
    assert [[label.start for label in call.documents] for call in server.engine.calls] == [[1], [1]]


def test_the_report_tells_of_named_documents_and_of_no_others(server):
    answer = server.complete("abcd", **asked({"id": "x", "text": "abc"})).json
    assert answer["kvgraft"]["documents"] == [
        {"id": "x", "start": 0, "length": 3, "exact_tokens": 1, "continued_tokens": 0, "copied_tokens": 0}
    ]
    assert "documents" not in server.complete("abcd").json["kvgraft"]


def named(name, text):
    return {"type": "text", "text": text, "kvgraft": {"document": name}}


def test_parts_of_messages_are_named_in_their_order(server):
    content = [named("one", "Same."), {"type": "text", "text": "and"}, named("other", " Same.\n")]
    server.chat({"role": "user", "content": content}, **asked({"id": "and", "text": "and"}))
    prompt = server.engine.calls[0].prompt
    found = {name: prompt[start:stop] for name, start, stop in labels(server)}
    assert found == {"and": "and", "one": "Same.", "other": "Same."}
    starts = {name: start for name, start, _ in labels(server)}
    assert starts["one"] < starts["and"] < starts["other"]


def test_parts_of_a_response_s_input_are_named(server):
    part = named("one", "Same.") | {"type": "input_text"}
    reply = server.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert reply.status == 200
    assert [name for name, _, _ in labels(server)] == ["one"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
        ("/v1/responses", {"input": "ab"}),
    ],
)
def test_prompts_are_not_looked_through_on_the_event_loop(server, monkeypatch, path, body):
    threads = []

    def places(*args):
        threads.append(threading.current_thread())
        return iter([0])

    monkeypatch.setattr(document_fields, "_places", places)
    assert server.post(path, body | asked({"id": "x", "text": "ab"})).status == 200
    assert len(threads) == 1
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("prompt", "documents", "param"),
    [
        ("ab", [{"id": "x"}], "kvgraft.documents[0].text"),
        ("ab", [{"id": "x", "text": "a", "range": [0, 1]}], "kvgraft.documents[0].text"),
        ("ab", [{"text": "a"}], "kvgraft.documents[0].id"),
        ("ab", [{"id": "x" * 257, "text": "a"}], "kvgraft.documents[0].id"),
        ("ab", [{"id": "x", "text": ""}], "kvgraft.documents[0].text"),
        ("ab", [{"id": "x", "text": "c"}], "kvgraft.documents[0].text"),
        ("ab", [{"id": "x", "text": "a"}, {"id": "y", "range": [1, 3]}], "kvgraft.documents[1].range"),
        ("ab", [{"id": "x", "range": [1, 1]}], "kvgraft.documents[0].range"),
        ("ab", [{"id": "x", "range": [0]}], "kvgraft.documents[0].range"),
        ("ab", [{"id": "x", "range": [-1, 1]}], "kvgraft.documents[0].range"),
        ("ab", [{"id": "x", "range": "all"}], "kvgraft.documents[0].range"),
        ("ab", [{"id": "x", "txt": "a"}], "kvgraft.documents[0]"),
        ("ab", ["x"], "kvgraft.documents[0]"),
        ("ab", {}, "kvgraft.documents"),
        ("ab", [{"id": "x", "text": "a"}] * 257, "kvgraft.documents"),
        ([1, 2], [{"id": "x", "text": "a"}], "kvgraft.documents[0].text"),
        (["ab", "cd"], [{"id": "x", "text": "a"}], "kvgraft.documents"),
    ],
)
def test_what_is_wrong_is_named(server, prompt, documents, param):
    reply = server.complete(prompt, kvgraft={"documents": documents})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.engine.calls == []


def test_documents_do_not_go_with_turns_of_completions(server):
    reply = server.complete("ab", session_id="s", **asked({"id": "x", "text": "a"}))
    assert reply.error["param"] == "kvgraft.documents"


@pytest.mark.parametrize(
    "extra",
    [
        {"kvgraft": {}},
        {"kvgraft": {"document": 3}},
        {"kvgraft": {"document": "x" * 257}},
        {"kvgraft": {"documents": "x"}},
        {"kvgraft": {"document": "x"}, "text": " "},
    ],
)
def test_wrong_names_of_parts_are_refused(server, extra):
    reply = server.chat({"role": "user", "content": [{"type": "text", "text": "a"} | extra]})
    assert (reply.status, server.engine.calls) == (400, [])
    assert reply.error["param"].startswith("messages[0].content[0]")


def test_ranges_are_not_for_chats(server):
    assert server.chat(**asked({"id": "x", "range": [0, 1]})).error["param"] == "kvgraft.documents[0].range"


def test_a_text_that_the_template_changes_is_refused(server):
    server.engine.loaded.tokenizer.chat_template = "x"
    server.engine.loaded.tokenizer.apply_chat_template = lambda *_args, **_options: "QUITE OTHER"
    assert server.chat({"role": "user", "content": [named("x", "other")]}).status == 400


def test_places_of_all_documents_together_are_bounded(server):
    documents = [{"id": f"d{number}", "text": "w"} for number in range(256)]
    reply = server.complete("w " * 4, **asked(*documents))
    assert (reply.status, len(labels(server))) == (200, 1024)
    reply = server.complete("w " * 5, **asked(*documents))
    assert (reply.status, reply.error["param"]) == (400, "kvgraft.documents[204].text")
    assert "give a range" in reply.error["message"]
    reply = server.complete("w " * 4, **asked(*documents[1:], {"id": "x", "text": "w w"}, {"id": "y", "range": [0, 1]}))
    assert reply.error["param"] == "kvgraft.documents"
    reply = server.complete("w" * 1024, **asked(documents[0], {"id": "y", "range": [0, 1]}))
    assert reply.error["param"] == "kvgraft.documents[1].range"
    assert len(server.engine.calls) == 1


def test_places_and_parts_of_a_conversation_are_bounded_together(server):
    content = [named("part", "ab"), {"type": "text", "text": "w" * 1024}]
    reply = server.chat({"role": "user", "content": content})
    assert reply.status == 200
    reply = server.chat({"role": "user", "content": content}, **asked({"id": "x", "text": "w"}))
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].kvgraft")
    content[1]["text"] += "w"
    reply = server.chat({"role": "user", "content": content}, **asked({"id": "x", "text": "w"}))
    assert (reply.status, reply.error["param"]) == (400, "kvgraft.documents[0].text")
    assert "give a longer text" in reply.error["message"]
