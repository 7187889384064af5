"""Request packs: the three kinds, where files are looked for, and one line for whatever is wrong with them."""

from __future__ import annotations

import gzip
import json

import pytest

from kvgraft.bench.packs import load_pack
from kvgraft.errors import ConfigError


def write(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def prompts(workload):
    return [request for session in workload.sessions for request in session.requests]


@pytest.fixture
def rag(tmp_path):
    write(tmp_path / "rag.docs.jsonl", {"doc": "a", "text": "text of a"}, {"doc": 7, "text": "text of 7"})
    write(
        tmp_path / "rag.requests.jsonl",
        {"rid": 0, "parts": [{"text": "Answer."}, {"doc": "a"}, {"doc": 7}]},
        "",
        {"rid": 1, "parts": [{"doc": 7}]},
    )
    return tmp_path


@pytest.mark.parametrize("given", ["rag", "rag.requests.jsonl"])
def test_requests_are_their_parts_joined_by_an_empty_line(rag, given):
    (workload,) = load_pack(str(rag / given))
    assert workload.name == "rag"
    assert prompts(workload) == ["Answer.\n\ntext of a\n\ntext of 7", "text of 7"]
    assert workload.num_prompts == 2


def test_requests_without_documents_need_no_docs_file(tmp_path):
    write(tmp_path / "mturn.requests.jsonl", {"parts": [{"text": "a"}, {"text": "b"}]})
    assert prompts(load_pack(str(tmp_path / "mturn"))[0]) == ["a\n\nb"]


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.jsonl.gz"])
@pytest.mark.parametrize("with_ending", [True, False])
def test_prompt_only_pack(tmp_path, name, with_ending):
    path = write(tmp_path / name, {"input": "zwölf", "output": "x"}, {"input": ""})
    (workload,) = load_pack(str(path if with_ending else tmp_path / "chat"))
    assert workload.name == "chat"
    assert prompts(workload) == ["zwölf", ""]


def test_arrivals_are_read_where_the_pack_has_them(tmp_path):
    write(tmp_path / "a.requests.jsonl", {"parts": [{"text": "x"}], "t": 0.5}, {"parts": [{"text": "y"}], "t": 2})
    write(tmp_path / "b.jsonl", {"input": "x", "t": 1.5})
    assert load_pack(str(tmp_path / "a"))[0].sessions[0].times == (0.5, 2.0)
    assert load_pack(str(tmp_path / "b"))[0].sessions[0].times == (1.5,)
    write(tmp_path / "b.jsonl", {"input": "x"})
    assert load_pack(str(tmp_path / "b"))[0].sessions[0].times is None


@pytest.mark.parametrize("second", [{"input": "y"}, {"input": "y", "t": "soon"}, {"input": "y", "t": True}])
def test_arrivals_of_some_requests_only_are_refused(tmp_path, second):
    write(tmp_path / "x.jsonl", {"input": "x", "t": 1.5}, second)
    assert_refused(tmp_path / "x", "x.jsonl:2", '"t"')


@pytest.mark.parametrize("given", ["adversarial.pairs", "adversarial.pairs.jsonl", "adversarial"])
def test_pairs_are_two_workloads_each_pair_with_a_cache_of_its_own(tmp_path, given):
    write(tmp_path / "adversarial.pairs.jsonl", {"a": "A", "b": "B", "question": "Q"}, {"a": "C", "b": "D"})
    there, back = load_pack(str(tmp_path / given))
    assert (there.name, back.name) == ("adversarial.pairs a->b", "adversarial.pairs b->a")
    assert [(session.cached, session.requests) for session in there.sessions] == [
        (("A\n\nQ",), ("B\n\nQ",)),
        (("C",), ("D",)),
    ]
    assert [(session.cached, session.requests) for session in back.sessions] == [
        (("B\n\nQ",), ("A\n\nQ",)),
        (("D",), ("C",)),
    ]


def test_line_separators_inside_a_text_do_not_split_the_line(tmp_path):
    write(tmp_path / "x.jsonl", '{"input": "a\u2028b\x0bc"}'.replace("\x0b", "\\u000b"))
    assert prompts(load_pack(str(tmp_path / "x"))[0]) == ["a\u2028b\x0bc"]


def assert_refused(path, *words):
    with pytest.raises(ConfigError) as caught:
        load_pack(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"input": "a"}', "{broken"], ["x.jsonl:2", "not JSON"]),
        (['["input"]'], ["x.jsonl:1", "object"]),
        (['{"prompt": "a"}'], ["x.jsonl:1", '"input"', "add it"]),
        (['{"input": 5}'], ["x.jsonl:1", '"input"']),
        ([], ["x.jsonl", "empty"]),
        (["", "  "], ["x.jsonl", "empty"]),
    ],
)
def test_malformed_prompts_are_refused_in_one_line(tmp_path, lines, words):
    write(tmp_path / "x.jsonl", *lines)
    assert_refused(tmp_path / "x", *words)


@pytest.mark.parametrize(
    ("request_line", "words"),
    [
        ({"parts": [{"doc": "b"}]}, ["rag.requests.jsonl:1", "'b'", "rag.docs.jsonl"]),
        ({"rid": 0}, ["rag.requests.jsonl:1", '"parts"']),
        ({"parts": "text"}, ["rag.requests.jsonl:1", '"parts"']),
        ({"parts": ["text"]}, ["rag.requests.jsonl:1", "part"]),
        ({"parts": [{"image": 1}]}, ["rag.requests.jsonl:1", "part"]),
        ({"parts": [{"text": None}]}, ["rag.requests.jsonl:1", '"text"']),
        ({"parts": [{"doc": None}]}, ["rag.requests.jsonl:1", '"doc"']),
    ],
)
def test_malformed_requests_are_refused_in_one_line(rag, request_line, words):
    write(rag / "rag.requests.jsonl", request_line)
    assert_refused(rag / "rag", *words)


@pytest.mark.parametrize(
    ("docs", "words"),
    [
        ([{"doc": "a", "text": "1"}, {"doc": "a", "text": "2"}], [":2", "'a'", "twice"]),
        ([{"doc": "a"}], [":1", '"text"']),
        ([{"text": "a"}], [":1", '"doc"']),
        (["nonsense"], [":1", "not JSON"]),
        ([], ["empty"]),
    ],
)
def test_malformed_documents_are_refused_in_one_line(rag, docs, words):
    write(rag / "rag.docs.jsonl", *docs)
    assert_refused(rag / "rag", "rag.docs.jsonl", *words)


def test_missing_docs_file_is_named(tmp_path):
    write(tmp_path / "x.requests.jsonl", {"parts": [{"doc": "a"}]})
    assert_refused(tmp_path / "x", "x.docs.jsonl", "'a'")


def test_pair_without_a_side_is_refused(tmp_path):
    write(tmp_path / "p.pairs.jsonl", {"a": "x"})
    assert_refused(tmp_path / "p.pairs", "p.pairs.jsonl:1", '"b"')


def test_missing_pack_names_what_was_looked_for(tmp_path):
    assert_refused(tmp_path / "nowhere", "nowhere", ".requests.jsonl")
    assert_refused(tmp_path, ".requests.jsonl")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"input": "\xff"}\n'),
        ("x.jsonl.gz", b"no gzip"),
        ("x.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:20]),
    ],
)
def test_unreadable_file_is_refused_in_one_line(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert_refused(tmp_path / "x", name, "cannot be read")
