"""Whatever is given to `LLM`, `AsyncLLM`, `SamplingParams`: one line of error for that request alone; the next is served."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError, KVGraftError, RequestError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

PROMPT = list(range(3, 23))
GREEDY = SamplingParams(4, ignore_eos=True)
HUGE = st.sampled_from(
    [2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**5000, -(10**400)]
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, VOCABULARY + 3),
    HUGE,
    st.floats(),
    st.sampled_from([1e-300, 5e-324, 1e-45, 1e300, -0.0, float("inf"), float("nan")]),
    st.text(max_size=4),
    st.sampled_from(["\ud800", "\x00", "graft", "first_k", "a\nb"]),
    st.binary(max_size=3),
    st.lists(st.integers(-2, 9), max_size=3),
    st.lists(st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.builds(object),
    st.sampled_from(
        [np.float32(0.5), np.int64(3), np.array([]), np.array([1.5]), np.array([[1]]), np.array(["a"]), int, len]
    ),
)
FIELDS = ["max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "logprobs"]
SAMPLING = st.dictionaries(st.sampled_from(FIELDS), ODD, min_size=1, max_size=3)
NAMES = ["prompt", "sampling", "reuse", "cache_salt", "selection", "correction"]
ARGUMENTS = st.dictionaries(st.sampled_from(NAMES), ODD, min_size=1, max_size=2)
STREAM_ARGUMENTS = st.dictionaries(st.sampled_from([*NAMES, "provisional"]), ODD, min_size=1, max_size=2)


def loaded():
    return adopt_model("llama", tiny_model("llama"), None)


@pytest.fixture(scope="module")
def llm():
    return LLM(loaded(), num_slots=400)


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate(PROMPT, GREEDY, "off")[0].token_ids


def assert_one_line(error):
    text = str(error)
    assert text
    assert len(text.splitlines()) == 1
    assert len(text) < 400


def sampling_params(values):
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        assert_one_line(error)
        return None


@given(SAMPLING)
@settings(max_examples=30)
@example({"seed": 2**64})
@example({"temperature": 1e-300})
@example({"temperature": 2**64})  # torch knows no integer that large
@example({"repetition_penalty": 2**64})
@example({"logit_bias": ((7, 2**64), (8, -(2**64)))})
@example({"stop": "abc"})
def test_sampling_parameters_are_refused_or_work(llm, expected, values):
    sampling = sampling_params(values)
    if sampling is not None:
        (output,) = llm.generate(PROMPT[:5], sampling, "off")
        assert output.token_ids
    assert llm.generate(PROMPT, GREEDY, "off")[0].token_ids == expected


@given(ARGUMENTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example({"cache_salt": 5})
@example({"selection": 5})
@example({"correction": "query_seam"})
@example({"prompt": np.array([1.5, 2.5])})
@example({"prompt": [True, False]})
def test_arguments_of_generate_and_score_are_refused_or_work(llm, expected, values):
    arguments = {"prompt": PROMPT[:5], "sampling": SamplingParams(2)} | values
    prompt, sampling = arguments.pop("prompt"), arguments.pop("sampling")
    for call in (
        lambda: llm.generate(prompt, sampling, **arguments),
        lambda: list(llm.stream(prompt, sampling, **arguments)),
        lambda: llm.score(PROMPT, prompt, **arguments),
        lambda: llm.tokenize(prompt),
        lambda: llm.validate(prompt, sampling),
    ):
        try:
            call()
        except (ConfigError, RequestError) as error:
            assert_one_line(error)
    assert llm.generate(PROMPT, GREEDY, "off")[0].token_ids == expected
    llm.check()
    assert llm.usage().request == 0


@given(st.lists(st.tuples(STREAM_ARGUMENTS, SAMPLING, ODD), min_size=1, max_size=4))
@settings(max_examples=8)
@example([({}, {"seed": 2**64}, "a")])
@example([({"cache_salt": 5}, {}, [1])])
@example([({"provisional": 1, "reuse": "verified"}, {}, "a"), ({"provisional": True}, {}, "b")])
def test_bad_requests_of_an_async_engine_harm_nobody_else(expected, cases):
    async def innocent(engine):
        request = await engine.prepare(PROMPT, GREEDY, "off")
        return tuple([part.token_id async for part in engine.stream(request)])

    async def odd(engine, values, sampling, name):
        arguments = {"prompt": PROMPT[:5], "sampling": sampling_params(sampling)} | values
        try:
            request = await engine.prepare(
                arguments.pop("prompt"), arguments.pop("sampling"), request_id=name, **arguments
            )
            async for _ in engine.stream(request):
                pass
        except KVGraftError as error:
            assert_one_line(error)

    async def main():
        engine = AsyncLLM(loaded(), num_slots=400)
        tasks = [innocent(engine), *(odd(engine, *case) for case in cases), innocent(engine)]
        first, *_, last = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        third = await asyncio.wait_for(innocent(engine), 60)
        await engine.check()
        await engine.close()
        return {first, last, third}

    assert asyncio.run(main()) == {expected}


@pytest.mark.parametrize("model", [None, 5, b"x", "", "\x00", "a\nb", [], "/nowhere/\x00", "~nobody/x"])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_name_of_a_model_that_is_none_is_refused_in_one_line(kind, model):
    with pytest.raises(KVGraftError) as caught:
        kind(model, num_slots=100)
    assert_one_line(caught.value)


@pytest.mark.parametrize("config", [5, {"num_slots": 100}, "x"])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_configuration_of_another_type_is_refused_in_one_line(kind, config):
    with pytest.raises(ConfigError) as caught:
        kind(loaded(), config)
    assert_one_line(caught.value)
