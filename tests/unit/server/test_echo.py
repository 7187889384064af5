"""Prompts in answers: `echo`, `prompt_logprobs`, token ids."""

from __future__ import annotations

import pytest

from kvgraft.server.echo import echo_of
from kvgraft.server.logprobs import TextOffsets


@pytest.mark.parametrize("prompt", ["Say it", list(b"Say it")])
def test_echo_is_in_front_of_the_text(server, prompt):
    assert server.complete(prompt, echo=True).json["choices"][0]["text"] == "Say ithello"


def test_echo_with_logprobs_has_those_of_the_prompt_in_front(server):
    reply = server.complete("Sä", echo=True, logprobs=1, max_tokens=2)
    assert server.engine.calls[0].sampling.prompt_logprobs == 1
    assert reply.json["choices"][0]["text"] == "Sähe"
    assert reply.json["choices"][0]["logprobs"] == {
        "tokens": ["S", r"bytes:\xc3", r"bytes:\xa4", "h", "e"],
        "token_logprobs": [None, -1.5, -1.5, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"a": -0.25, r"bytes:\xc3": -1.5},
            {"a": -0.25, r"bytes:\xa4": -1.5},
            {"a": -9999.0, "h": -0.5},
            {"a": -9999.0, "e": -0.5},
        ],
        "text_offset": [0, 1, 1, 2, 3],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_generated_with_max_tokens_of_0(server, stream):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {} if not stream else {"stream_options": options}
    reply = server.complete("ab", echo=True, max_tokens=0, stream=stream, logprobs=1, **asked)
    assert server.engine.calls[0].sampling.max_new_tokens == 1
    if stream:
        *chunks, usage, done = reply.events
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert (usage["usage"]["completion_tokens"], done) == (0, "[DONE]")
        assert {chunk["usage"]["completion_tokens"] for chunk in chunks} == {0}
        assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]
        choice = chunks[-1]["choices"][0]
    else:
        choice = reply.json["choices"][0]
        assert choice["text"] == "ab"
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
        assert reply.json["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_stream_begins_with_the_echo(server):
    texts = [event["choices"][0]["text"] for event in server.complete("ab", echo=True, stream=True).events[:-1]]
    assert texts == ["ab", *"hello"]


def test_stream_with_logprobs_begins_with_those_of_the_prompt(server):
    first, *others, _done = server.complete("Sä", echo=True, logprobs=1, max_tokens=2, stream=True).events
    assert first["choices"][0]["text"] == "Sä"
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["S", r"bytes:\xc3", r"bytes:\xa4"],
        "token_logprobs": [None, -1.5, -1.5],
        "top_logprobs": [None, {"a": -0.25, r"bytes:\xc3": -1.5}, {"a": -0.25, r"bytes:\xa4": -1.5}],
        "text_offset": [0, 1, 1],
    }
    told = [chunk["choices"][0]["logprobs"] for chunk in others]
    assert [(logprobs["tokens"], logprobs["text_offset"]) for logprobs in told] == [(["h"], [2]), (["e"], [3])]


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_streamed_prompt_logprobs_come_first_and_once(server, call):
    whole = getattr(server, call)(prompt_logprobs=1).json
    *chunks, _done = getattr(server, call)(prompt_logprobs=1, stream=True).events
    told = [chunk if call == "chat" else chunk["choices"][0] for chunk in chunks]
    assert told[0]["prompt_logprobs"] == (whole if call == "chat" else whole["choices"][0])["prompt_logprobs"]
    assert len(told[0]["prompt_logprobs"]) > 1
    assert not any("prompt_logprobs" in other for other in told[1:])


def test_each_of_several_answers_has_the_echo_of_its_prompt(server):
    choices = server.complete(["one", "two"], n=2, echo=True).json["choices"]
    assert [choice["text"] for choice in choices] == ["onehello", "onehello", "twohello", "twohello"]


def test_what_lm_eval_sends_can_be_read_as_it_does(server):
    context, continuation = list(b"The sky is"), list(b" blue")
    body = {
        "prompt": [context + continuation],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    told = server.post("/v1/completions", body | {"model": "fake"}).json["choices"][0]["logprobs"]
    scored = told["token_logprobs"][len(context) : -1]
    assert scored == [-1.5] * len(continuation)
    assert [max(top.values()) for top in told["top_logprobs"][len(context) : -1]] == [-0.25] * len(continuation)


def test_echo_does_not_need_a_tokenizer(server):
    server.engine.loaded.tokenizer = None
    reply = server.complete([1, 2], echo=True, logprobs=0, max_tokens=1)
    assert reply.json["choices"][0]["logprobs"]["tokens"] == ["token_id:1", "token_id:2", "token_id:104"]


def test_of_tokens_with_one_text_the_prompt_s_has_the_name(server):
    server.engine.loaded.tokenizer.backend_tokenizer = None
    server.engine.loaded.tokenizer.decode = lambda ids: "x"
    told = server.complete("ab", echo=True, logprobs=3, max_tokens=0).json["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [None, {"token_id:97": -0.25, "x": -0.5, "token_id:99": -0.75}]


def test_prompt_logprobs_have_the_form_of_vllm(server):
    told = server.complete("aaz", prompt_logprobs=1).json["choices"][0]["prompt_logprobs"]
    likeliest = {"logprob": -0.25, "rank": 1, "decoded_token": "a"}
    assert told == [
        None,
        {"97": likeliest},
        {"122": {"logprob": -1.5, "rank": None, "decoded_token": "z"}, "97": likeliest},
    ]


def test_prompt_logprobs_of_a_chat_stand_beside_the_choices(server):
    answer = server.chat(prompt_logprobs=0).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]


def test_prompt_logprobs_may_be_all_that_is_asked(server):
    answer = server.complete("ab", prompt_logprobs=0, max_tokens=0).json
    assert answer["choices"][0]["text"] == ""
    assert len(answer["choices"][0]["prompt_logprobs"]) == 2


def test_more_logprobs_of_the_prompt_than_of_the_output(server):
    choice = server.complete("ab", prompt_logprobs=3, echo=True, logprobs=1).json["choices"][0]
    assert server.engine.calls[0].sampling.prompt_logprobs == 3
    assert choice["logprobs"]["top_logprobs"][1] == {"a": -0.25, "b": -1.5}
    assert len(choice["prompt_logprobs"][1]) == 3


def test_token_ids_are_told_if_asked(server):
    choice = server.complete("ab", return_token_ids=True).json["choices"][0]
    assert (choice["prompt_token_ids"], bytes(choice["token_ids"])) == ([97, 98], b"hello")
    answer = server.chat(return_token_ids=True).json
    assert bytes(answer["choices"][0]["token_ids"]) == b"hello"
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert "token_ids" not in server.complete("ab").json["choices"][0]


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_streamed_token_ids_are_told_once(server, call):
    *chunks, _done = getattr(server, call)(stream=True, return_token_ids=True).events
    assert bytes(token for chunk in chunks for token in chunk["choices"][0]["token_ids"]) == b"hello"
    first, *others = [chunk if call == "chat" else chunk["choices"][0] for chunk in chunks]
    assert len(first["prompt_token_ids"]) > 0
    assert not any("prompt_token_ids" in other for other in others)


class TrimmingTokenizer:
    """Tells the offsets of words without the blanks that belong to them, as byte-level tokenizers may."""

    is_fast = True

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        assert return_offsets_mapping
        offsets = [(0, 0)] * add_special_tokens + [(0, 3), (4, 7), (0, 0), (8, 9), (8, 9)]
        return {"input_ids": [0] * len(offsets), "offset_mapping": offsets}


def test_offsets_of_a_text_count_blanks_and_whole_characters():
    echo = echo_of("The sky é", [0] * 6, TrimmingTokenizer(), add_special_tokens=True)
    assert echo.offsets == (0, 0, 3, 7, 7, 8)


def test_offsets_go_on_behind_incomplete_characters(server):
    offsets = TextOffsets(server.engine.loaded.tokenizer, 10)
    assert [offsets.next(byte) for byte in "aéb".encode()] == [10, 11, 11, 12]
