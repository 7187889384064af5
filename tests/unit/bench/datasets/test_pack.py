"""Packs of every data set: rows as it publishes them, and the requests that other benchmarks read."""

from __future__ import annotations

import json

import pytest

from kvgraft.bench.datasets import DATASETS, PackSettings, make_pack, write_pack
from kvgraft.bench.fidelity.suites import load_suite
from kvgraft.bench.packs import load_pack
from kvgraft.cli import build_parser, main
from kvgraft.errors import ConfigError

LONG = "x" * 4_000


def write(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def packed(folder, name, rows, *options):
    """Requests of the pack that the command makes of `rows`, as the fidelity benchmark reads them."""
    assert main(["bench", "pack", "dataset", name, str(write(folder, rows)), "--output", str(folder), *options]) == 0
    requests = load_suite(str(folder / name), ".").requests
    (workload,) = load_pack(str(folder / name))
    assert [request.prompt for request in requests] == list(workload.sessions[0].requests)
    return requests


def test_every_data_set_is_named_in_the_help():
    pack = build_parser()
    for name in DATASETS:
        assert pack.parse_args(["bench", "pack", "dataset", name, "FILE", "--output", "D"]).name == name


def test_wildchat_is_a_prompt_per_conversation_of_users_with_several(tmp_path):
    def conversation(user, *said):
        turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=False)]
        return {"hashed_ip": user, "conversation": turns, "model": "gpt"}

    rows = [
        conversation("a", f"first {LONG}", "answered", "and then?"),
        conversation("b", f"alone {LONG}"),
        conversation("a", "too short"),
        conversation("a", f"second {LONG}"),
    ]
    first, second = packed(tmp_path, "wildchat", rows)
    assert first.prompt == f"first {LONG}\n\nand then?"
    assert (second.prompt, second.keys) == (f"second {LONG}", ("a",))


def test_a_conversation_may_be_a_prompt_per_turn_after_all_that_was_said(tmp_path):
    said = [("human", "One?"), ("gpt", "Yes."), ("human", "Two?")]
    rows = [{"id": 7, "conversations": [{"from": role, "value": text} for role, text in said]}]
    first, second = packed(tmp_path, "conversation", rows)
    assert first.prompt == "User: One?\n\nAssistant:"
    assert second.prompt == "User: One?\n\nAssistant: Yes.\n\nUser: Two?\n\nAssistant:"
    assert (first.answers, second.answers, second.group) == (("Yes.",), (), "7")


def test_an_article_is_asked_for_behind_every_instruction(tmp_path):
    rows = [{"article": f"Article {name}.", "highlights": f"sum {name}", "id": name} for name in "ab"]
    requests = packed(tmp_path, "cnn_dailymail", rows)
    assert len(requests) == 8
    assert len({request.prompt for request in requests}) == 8
    about_a = [request for request in requests if "Article a." in request.prompt]
    assert {request.answers for request in about_a} == {("sum a",)}
    assert {request.parts[1].text for request in about_a} == {"Article a."}
    assert len({request.parts[0].text for request in about_a}) == 4


def test_articles_of_a_cluster_are_passages_and_equal_ones_are_kept_once(tmp_path):
    rows = [{"document": "One.|||||Two.|||||", "summary": "s"}, {"document": "Two. ||||| Three.", "summary": "t"}]
    requests = packed(tmp_path, "multi_news", rows, "--askings", "1", "--instruction", "Read.")
    assert {request.prompt for request in requests} == {
        "Read.\n\nOne.\n\nTwo.\n\nSummarise the text.",
        "Read.\n\nTwo.\n\nThree.\n\nSummarise the text.",
    }
    docs = [json.loads(line) for line in (tmp_path / "multi_news.docs.jsonl").read_text().splitlines()]
    assert docs == [{"doc": 0, "text": "One."}, {"doc": 1, "text": "Two."}, {"doc": 2, "text": "Three."}]


def test_lines_of_wikitext_are_articles(tmp_path):
    lines = ["", " = First article = ", "", " Text . ", " = = Part = = ", " More . ", " = Second = ", " Last . "]
    requests = packed(tmp_path, "wikitext-103", [{"text": line + "\n"} for line in lines], "--askings", "1")
    assert sorted(request.parts[1].text for request in requests) == [
        "= First article = \n\n Text . \n = = Part = = \n More .",
        "= Second = \n Last .",
    ]


def test_longeval_asks_in_its_last_line(tmp_path):
    rows = [{"prompt": "Remember.\nline a: <1>\nline b: <2>\nWhat is in line b?\n", "expected_number": 2}]
    requests = packed(tmp_path, "longeval", rows)
    assert len(requests) == 3
    assert {request.parts[1].text for request in requests} == {"Remember.\nline a: <1>\nline b: <2>"}
    assert {request.parts[2].text for request in requests} == {"Question: What is in line b?\nAnswer:"}
    assert requests[0].answers == ("2",)
    assert load_suite(str(tmp_path / "longeval"), ".").metric == "value"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        (
            "narrativeqa",
            {
                "document": {"text": "The whole story.", "summary": {"text": "Body."}},
                "question": {"text": "Who?"},
                "answers": [{"text": "I"}, {"text": "me"}],
            },
        ),
        ("narrativeqa", {"summary": "Body.", "question": "Who?", "answers": ["I", "me"]}),
        (
            "triviaqa",
            {
                "entity_pages": {"wiki_context": []},
                "search_results": {"search_context": ["Body."]},
                "question": "Who?",
                "answer": {"aliases": ["I", "me"], "value": "I"},
            },
        ),
        ("scbench", {"context": "Body.", "multi_turns": [{"input": "Who?", "answer": ["I", "me"]}]}),
        ("loogle", {"input": "Body.", "qa_pairs": "[{'Q': 'Who?', 'A': ['I', 'me']}]"}),
        ("loogle", {"context": "Body.", "question": "Who?", "answer": ["I", "me"]}),
        ("question", {"context": "Body.", "question": "Who?", "answers": ["I", "me"]}),
    ],
)
def test_questions_are_asked_over_their_document(tmp_path, name, row):
    (request,) = packed(tmp_path, name, [row])
    assert request.parts[1].text == "Body."
    assert request.parts[2].text == "Question: Who?\nAnswer:"
    assert request.answers == ("I", "me")


def test_questions_of_one_row_have_their_own_answers_and_other_instructions(tmp_path):
    turns = [{"input": "One?", "answer": "1"}, {"input": "Two?", "answer": ["2", "two"]}]
    requests = packed(tmp_path, "scbench", [{"context": "Body.", "multi_turns": turns}])
    assert {request.parts[2].text.split()[1]: request.answers for request in requests} == {
        "One?": ("1",),
        "Two?": ("2", "two"),
    }
    assert len({request.parts[0].text for request in requests}) == 2
    assert requests[0].keys == requests[1].keys == ("0",)


def test_answers_that_are_not_one_per_question_are_refused(tmp_path):
    path = write(tmp_path, [{"context": "Body.", "question": ["One?", "Two?"], "answers": ["1"]}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: the answers are no list of 2, one per question"):
        make_pack(DATASETS["question"], [path], PackSettings())


def test_a_field_of_another_name_is_given(tmp_path, capsys):
    rows = [{"body": {"en": "Body."}, "q": "Who?"}]
    (request,) = packed(tmp_path, "question", rows, "--document", "body.en", "--question", "q")
    assert request.parts[1].text == "Body."
    assert "question.requests.jsonl: 1 requests, 1 documents" in capsys.readouterr().out
    assert main(["bench", "pack", "dataset", "question", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path)]) == 2
    assert "rows.jsonl:1: there is nothing at document or context; the row has body, q" in capsys.readouterr().err


def test_rows_are_limited_over_all_files_and_the_order_is_drawn(tmp_path):
    files = [write(tmp_path, [{"text": f"{name}{i}"} for i in range(5)], f"{name}.jsonl") for name in "ab"]
    made = [make_pack(DATASETS["document"], files, PackSettings(limit=7, seed=seed)) for seed in (0, 0, 1)]
    assert list(made[0].documents) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]
    assert made[0].requests == made[1].requests != made[2].requests


def test_a_pack_takes_the_place_of_one_with_documents(tmp_path):
    path = write(tmp_path, [{"text": "Body.", "messages": ["One?", "Two?"]}])
    for name in ("document", "conversation"):
        write_pack(make_pack(DATASETS[name], [path], PackSettings()), tmp_path / "new", "pack")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["pack.requests.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nothing", "F"), "no data set 'nothing'; choose of wildchat"),
        (("document", "F", "--askings", "0"), "--askings must be at least 1"),
        (("document", "F", "--limit", "0"), "at least one row"),
        (("document", "{rows}", "--min-characters", "99"), "no request can be made of the rows"),
        (("conversation", "{rows}", "--messages", "text"), "the messages are no list"),
        (("conversation", "{rows}", "--messages", "turns"), 'neither "role" nor "from"'),
        (("document", "{rows}", "--output", "{rows}/folder"), "give another folder for --output"),
    ],
)
def test_what_cannot_be_packed_is_told_in_one_line(tmp_path, capsys, options, message):
    rows = write(tmp_path, [{"text": "Body.", "turns": [{"text": "x"}]}])
    given = [option.format(rows=rows) for option in options]
    assert main(["bench", "pack", "dataset", "--output", str(tmp_path), *given]) == 2
    assert message in capsys.readouterr().err
