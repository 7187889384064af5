"""Suites from packs, and the one that every machine has."""

from __future__ import annotations

import json

import pytest

from kvgraft.bench.fidelity.suites import load_suite, load_suites
from kvgraft.errors import ConfigError


@pytest.fixture
def pack(tmp_path):
    """Return a function that writes lines of objects."""

    def write(name, *records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path)

    return write


def test_documents_answers_and_groups(pack):
    parts = [{"text": "Answer."}, {"doc": "one"}, {"doc": 2}, {"text": "Question?"}]
    pack("rag.docs.jsonl", {"doc": "one", "text": "First."}, {"doc": 2, "text": "Second."})
    data = pack("rag.requests.jsonl", {"rid": 7, "group": "g", "parts": parts, "answers": ["yes", "no"]})
    suite = load_suite("rag", data)
    (request,) = suite.requests
    assert request.prompt == "Answer.\n\nFirst.\n\nSecond.\n\nQuestion?"
    assert (request.rid, request.keys, request.group, request.answers) == ("7", ("one", "2"), "g", ("yes", "no"))
    assert suite.metric == "f1"


def test_requests_without_documents_belong_to_their_group(pack):
    data = pack("mturn.requests.jsonl", {"group": "talk", "parts": [{"text": "Hello"}]})
    assert load_suite("mturn", data).requests[0].keys == ("talk",)


def test_lines_are_scored_by_value_and_a_path_names_a_pack(pack):
    data = pack("lines.requests.jsonl", {"parts": [{"text": "x"}], "answers": ["1"]})
    assert load_suite(f"{data}/lines", "nowhere").metric == "value"


def test_pairs_are_asked_in_both_directions(pack):
    record = {
        "pid": 3,
        "a": "It is 308.",
        "b": "It is 247.",
        "question": "What?",
        "answer_a": "308",
        "answer_b": [["247"]],
    }
    there, back = load_suite("adversarial", pack("adversarial.pairs.jsonl", record)).requests
    assert (there.prompt, there.donor_prompt) == ("It is 247.\n\nWhat?", "It is 308.\n\nWhat?")
    assert (there.answers, there.stale) == (("247",), ("308",))
    assert (back.prompt, back.donor_prompt) == (there.donor_prompt, there.prompt)
    assert (back.answers, back.stale) == (("308",), ("247",))
    assert there.keys == back.keys


def test_agents_are_grouped_by_session(pack):
    data = pack("agent.jsonl", {"input": "one", "session_id": "s"}, {"input": "two", "session_id": "s"})
    assert [request.keys for request in load_suite("agent", data).requests] == [("s",), ("s",)]


def test_a_missing_pack_names_the_builtin_one(tmp_path):
    with pytest.raises(ConfigError, match=r"no pack .*rag for the suite 'rag'.*'builtin'") as caught:
        load_suite("rag", str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("x.requests.jsonl", {"parts": "text"}, "no list"),
        ("x.requests.jsonl", {"parts": [{"doc": "unknown"}]}, "with a document of the pack"),
        ("x.requests.jsonl", {"parts": [], "answers": [1]}, '"answers" is neither'),
        ("x.pairs.jsonl", {"a": "a", "b": "b"}, '"question" is missing'),
        ("x.jsonl", {"output": "x"}, '"input" is missing'),
    ],
)
def test_malformed_packs_are_refused_with_their_line(pack, name, record, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_suite("x", pack(name, record))
    assert f"{name}:1" in str(caught.value)


def test_an_empty_pack_is_refused(tmp_path):
    (tmp_path / "rag.requests.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        load_suite("rag", str(tmp_path))


def test_a_suite_is_named_once():
    with pytest.raises(ConfigError, match="twice"):
        load_suites(["builtin", "builtin"], "")


def test_builtin_is_the_same_every_time_and_can_be_answered():
    first, again = (load_suite("builtin", "nowhere").requests for _ in range(2))
    assert first == again
    assert len({request.rid for request in first}) == len(first) > 100
    for request in first:
        assert request.answers[0] in request.keys
        assert request.answers[0] in request.prompt
        assert len(request.keys) == 4
