from __future__ import annotations

import pytest

from kvgraft.errors import ConfigError, NothingToDrawError, RequestError


def test_completion_has_the_shape_of_openai(server):
    reply = server.complete("Say it")
    answer = reply.json
    assert reply.status == 200
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 1},
        "kvgraft": {
            "reused_tokens": 1,
            "exact_tokens": 1,
            "continued_tokens": 0,
            "shifted_tokens": 0,
            "substituted_tokens": 0,
            "computed_tokens": 5,
            "miss": "no_donors",
        },
    }
    assert (
        reply.headers["x-kvgraft-report"]
        == "reused=1, exact=1, continued=0, shifted=0, substituted=0, computed=5, miss=no_donors"
    )
    assert answer["kvgraft"]["reused_tokens"] == 1
    assert answer["kvgraft"]["miss"] == {"reason": "no_donors", "detail": ""}


def test_defaults_are_those_of_openai(server):
    server.complete()
    call = server.engine.calls[0]
    assert (call.sampling.max_new_tokens, call.sampling.temperature, call.sampling.top_p) == (16, 1.0, 1.0)
    assert (call.reuse, call.selection, call.cache_salt, call.sampling.seed) == ("graft", None, "", None)
    assert call.repair is None
    assert call.priority == 0


def test_fields_reach_the_engine(server):
    server.complete(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=-5,
        stop=["x", "y"],
        ignore_eos=True,
        logprobs=2,
        cache_salt="tenant",
        priority=-3,
        kvgraft={"reuse": "exact", "selection": "first_k", "correction": "drift", "repair": "before"},
    )
    call = server.engine.calls[0]
    sampling = call.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (3, 0.5, 0.9, 0)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos, sampling.logprobs) == (-5, ("x", "y"), True, 2)
    assert (call.cache_salt, call.reuse, call.priority) == ("tenant", "exact", -3)
    assert (call.selection, call.correction, call.repair) == ("first_k", "drift", "before")


def test_null_is_absent(server):
    nothing = dict.fromkeys(["max_tokens", "temperature", "stop", "seed", "n", "stream", "kvgraft", "suffix", "model"])
    assert server.complete(**nothing).status == 200
    assert server.engine.calls[0].sampling.max_new_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prepared"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["ab", [99]], ["ab", [99]]),
    ],
)
def test_every_form_of_prompt_is_understood(server, prompt, prepared):
    reply = server.complete(prompt)
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(len(prepared)))
    assert server.engine.prepared == prepared


def test_several_choices_carry_their_own_report_and_count_the_prompt_once(server):
    answer = server.complete(["one", "other"], n=2, seed=7).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["kvgraft"]["num_tokens"] for choice in answer["choices"]] == [3, 3, 5, 5]
    assert "kvgraft" not in answer
    assert answer["usage"]["prompt_tokens"] == 3 + 5
    assert answer["usage"]["completion_tokens"] == 4 * 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [call.sampling.seed for call in server.engine.calls] == [7, 8, 9, 10]
    assert len({call.request_id for call in server.engine.calls}) == 4


def test_logprobs_have_the_shape_of_openai(server):
    told = server.complete(logprobs=1, max_tokens=2).json["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["h", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -9999.0, "h": -0.5}, {"a": -9999.0, "e": -0.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_tokens_by_their_ids_if_asked(server, stream):
    reply = server.complete("ab", echo=True, logprobs=1, max_tokens=1, return_tokens_as_token_ids=True, stream=stream)
    answers = reply.events[:-1] if stream else [reply.json]
    told = [answer["choices"][0]["logprobs"] for answer in answers]
    assert [name for logprobs in told for name in logprobs["tokens"]] == ["token_id:97", "token_id:98", "token_id:104"]
    assert told[-1]["top_logprobs"][-1] == {"token_id:97": -9999.0, "token_id:104": -0.5}


def test_small_temperature_is_greedy(server):
    server.complete(temperature=1e-9)
    assert server.engine.calls[0].sampling.temperature == 0


def test_default_reuse_is_the_configured_one(make_server):
    server = make_server(reuse="off")
    server.complete()
    assert server.engine.calls[0].reuse == "off"


def test_answer_without_tokenizer_names_token_ids(server):
    server.engine.loaded.tokenizer = None
    told = server.complete([1, 2], logprobs=0, max_tokens=1).json["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:104"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True, 1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": ["a", [1.5]]}, "prompt[1]"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "session_id": "s"}, "echo"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {"a": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": 3}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [3]}, "bad_words"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"kvgraft": "off"}, "kvgraft"),
        ({"kvgraft": {"reuse": "maybe"}}, "kvgraft.reuse"),
        ({"kvgraft": {"reuse": ["off"]}}, "kvgraft.reuse"),
        ({"kvgraft": {"selection": "best"}}, "kvgraft.selection"),
        ({"kvgraft": {"correction": "some"}}, "kvgraft.correction"),
        ({"kvgraft": {"repair": "later"}}, "kvgraft.repair"),
        ({"kvgraft": {"repair": True}}, "kvgraft.repair"),
        ({"kvgraft": {"re-use": "off"}}, "kvgraft"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_field_is_named(server, fields, param):
    reply = server.complete(**fields)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert param in reply.error["message"]
    assert server.engine.prepared == []


def test_harmless_values_of_unsupported_fields_are_accepted(server):
    fields = {"echo": False, "suffix": "", "best_of": 1, "length_penalty": 1.0, "use_beam_search": False}
    assert server.complete(**fields, response_format={"type": "text"}).status == 200


def test_too_long_prompt_is_400_with_the_engine_s_words(server):
    reply = server.complete("x" * 5000)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "shorten it" in reply.error["message"]


def test_rules_that_leave_no_token_are_the_client_s_fault(server):
    server.engine.failure = NothingToDrawError("allowed_token_ids and logit_bias leave no token; allow more")
    assert server.complete(allowed_token_ids=[1]).status == 400


def test_second_of_several_prompts_that_is_wrong_fails_the_request(server):
    assert server.complete(["fine", ""]).status == 400


def test_other_model_is_404(server):
    reply = server.complete(model="gpt-4")
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"


def test_served_name_is_the_one_clients_must_give(make_server):
    server = make_server(served_model_name="mine")
    assert server.complete(model="mine").json["model"] == "mine"
    assert server.complete(model="fake").status == 404


def test_config_error_while_streaming_starts_is_400(server):
    server.engine.failure = ConfigError("an unfinished request has this id")
    assert server.complete(stream=True).status == 400


@pytest.mark.parametrize("reuse", ["graft", "exact", "off"])
def test_choices_of_a_prompt_begin_when_the_first_has_computed_it(server, reuse):
    """What the first one computes the others find in the cache; without a cache nothing is gained by waiting."""
    assert server.complete(["a", "b"], n=3, kvgraft={"reuse": reuse}).status == 200
    begun = {request_id.rpartition("-")[2]: num_parts for request_id, num_parts in server.engine.started}
    assert len(begun) == 6
    waits = {number for number, num_parts in begun.items() if num_parts}
    assert waits == (set() if reuse == "off" else {"1", "2", "4", "5"})


def test_choices_whose_first_fails_do_not_begin(server):
    server.engine.failure = RequestError("the engine failed")
    assert server.complete("a", n=3).status == 500
    assert len(server.engine.started) == 1


def test_choices_begin_at_once_where_the_queue_has_no_room_for_them_later(make_server):
    server = make_server(max_waiting=4)
    assert server.complete("a", n=3).status == 200
    assert {num_parts for _, num_parts in server.engine.started} == {0}
