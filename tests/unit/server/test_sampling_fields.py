"""Fields that say how tokens are drawn reach the engine under its own names."""

from __future__ import annotations

import pytest

from kvgraft.engine.sampling.sampling_params import SamplingParams

ASKED = {
    "frequency_penalty": -1.5,
    "presence_penalty": 2,
    "repetition_penalty": 1.2,
    "logit_bias": {"7": -100, "12": 2.5, "9": None},
    "min_p": 0.1,
    "stop_token_ids": [3, 4],
    "min_tokens": 2,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2, 3],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 2,
}
MEANT = {
    "frequency_penalty": -1.5,
    "presence_penalty": 2.0,
    "repetition_penalty": 1.2,
    "logit_bias": ((7, -100.0), (12, 2.5)),
    "min_p": 0.1,
    "stop_token_ids": (3, 4),
    "min_tokens": 2,
    "bad_token_ids": ((110, 111),),
    "allowed_token_ids": (1, 2, 3),
    "include_stop": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 2,
}


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_every_rule_reaches_the_engine(server, call):
    reply = getattr(server, call)(**ASKED)
    assert reply.status == 200, reply.body
    sampling = server.engine.calls[0].sampling
    assert {name: getattr(sampling, name) for name in MEANT} == MEANT


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_whole_numbers_may_be_written_with_a_point(server, call):
    asked = {"max_tokens": 16.0, "top_k": 50.0, "n": 1.0, "seed": -3.0, "min_tokens": 2e0, "stop_token_ids": [3.0, 4]}
    assert getattr(server, call)(**asked).status == 200
    sampling = server.engine.calls[0].sampling
    given = (sampling.max_new_tokens, sampling.top_k, sampling.seed, sampling.min_tokens, sampling.stop_token_ids)
    assert given == (16, 50, -3, 2, (3, 4))
    assert not any(isinstance(number, float) for number in [*given[:-1], *given[-1]])


def test_token_ids_of_a_prompt_may_be_written_with_a_point(server):
    assert server.complete([97.0, 98]).status == 200
    assert [type(token) for token in server.engine.prepared[0]] == [int, int]


@pytest.mark.parametrize("number", [1.5, True, "1", 1e300, -2.0])
@pytest.mark.parametrize("field", ["max_tokens", "n"])
def test_other_numbers_are_not_whole(server, field, number):
    reply = server.complete(**{field: number})
    assert (reply.status, reply.error["param"]) == (400, field)


@pytest.mark.parametrize("call", ["complete", "chat"])
def test_without_them_nothing_is_asked(server, call):
    getattr(server, call)()
    sampling, default = server.engine.calls[0].sampling, SamplingParams()
    assert [name for name in MEANT if getattr(sampling, name) != getattr(default, name)] == []


def test_bad_words_need_a_tokenizer(server):
    server.engine.loaded.tokenizer = None
    reply = server.complete([1], bad_words=["no"])
    assert reply.status == 400
    assert "tokenizer" in reply.error["message"]
    assert reply.error["param"] == "bad_words"
