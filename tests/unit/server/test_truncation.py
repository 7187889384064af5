"""Prompts that are cut to what is asked for, as vLLM cuts them."""

from __future__ import annotations

import pytest


def prepared(server):
    return [prompt if isinstance(prompt, str) else list(map(int, prompt)) for prompt in server.engine.prepared]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [3, 4, 5]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [3, 4, 5]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 5}, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 2**31}, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": None, "truncation_side": "right"}, [1, 2, 3, 4, 5]),
    ],
)
def test_so_many_tokens_are_kept(server, fields, kept):
    answer = server.complete([1, 2, 3, 4, 5], **fields).json
    assert prepared(server) == [kept]
    assert answer["usage"]["prompt_tokens"] == len(kept)


def test_as_many_as_fit_leave_room_for_an_answer(server):
    prompt = "x" * server.engine.max_model_len
    assert server.complete(prompt).error["code"] == "context_length_exceeded"
    assert server.complete(prompt, truncate_prompt_tokens=-1).status == 200
    assert len(server.engine.prepared[0]) == server.engine.max_model_len - 1


def test_texts_are_cut_in_tokens_and_special_ones_count(server):
    server.complete(["abc", "d"], n=2, truncate_prompt_tokens=2, truncation_side="right")
    assert prepared(server) == [[2, 97]] * 2 + [[2, 100]] * 2


def test_conversations_are_cut_where_they_are_rendered(server):
    server.chat(truncate_prompt_tokens=10)
    assert bytes(prepared(server)[0]) == b"Assistant:"


def test_token_ids_and_log_probabilities_are_those_of_what_is_kept(server):
    asked = {"truncate_prompt_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    choice = server.complete([1, 2, 3], **asked).json["choices"][0]
    assert choice["prompt_token_ids"] == [2, 3]
    assert len(choice["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "3"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
        ({"truncate_prompt_tokens": 3, "session_id": "s"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "echo": True}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "kvgraft": {"documents": [{"id": "x", "text": "a"}]}}, "kvgraft.documents"),
    ],
)
def test_what_does_not_go_together_is_refused(server, fields, param):
    reply = server.complete("abcd", **fields)
    assert (reply.status, reply.error["param"], server.engine.calls) == (400, param, [])


def test_named_parts_of_conversations_are_not_cut(server):
    part = {"type": "text", "text": "a", "kvgraft": {"document": "x"}}
    reply = server.chat({"role": "user", "content": [part]}, truncate_prompt_tokens=3)
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].kvgraft")


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server, call, monkeypatch):
    """It is long however it is cut, and would hold up all other long texts."""
    tokenised = []
    monkeypatch.setattr(server.engine, "tokenize", tokenised.append)
    text = "x" * 4_000_000
    given = text if call == "complete" else {"role": "user", "content": text}
    reply = getattr(server, call)(given, truncate_prompt_tokens=10)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert tokenised == []
