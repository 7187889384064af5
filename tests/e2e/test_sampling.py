"""What a request says about its tokens: as transformers has it, and the same whatever is reused and whoever else runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL
from tests.sampling_rules import assert_scored

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, FinishReason, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.sampling.sampling import Sampler
from kvgraft.engine.schedule import scheduler
from kvgraft.errors import ConfigError, NothingToDrawError
from kvgraft.graft.select import FirstK
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason

NEW = 14
END = 2


def words(count, seed):
    return np.random.default_rng(seed).integers(3, VOCABULARY, count)


DOCUMENT = words(150, 0)
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2}
BAD = tuple((int(a), int(b)) for a, b in np.random.default_rng(5).integers(3, 40, (60, 2)))
BAD_IDS = (*BAD, (50,), (51,))
MASKS = {
    "bad_token_ids": BAD_IDS,
    "allowed_token_ids": tuple(range(2, 60)),
    "logit_bias": ((9, 0.2), (12, -9.0)),
}
RULES = {
    "penalties": PENALTIES,
    "masks": MASKS,
    "all": {**PENALTIES, **MASKS, "min_tokens": 5, "stop_token_ids": (33,)},
    "drawn": {**PENALTIES, **MASKS, "temperature": 0.9, "min_p": 0.02, "top_p": 0.95, "seed": 4},
}


def make_engine(family="llama", **settings):
    """Steps carry few rows, so that a prompt is computed in many pieces."""
    config = EngineConfig(**SMALL | {"num_slots": 2_000, "max_rows": 40, "host_bytes": 10_000_000, **settings})
    return Engine(adopt_model(family, tiny_model(family), None), config)


def submit(engine, prompt, reuse, **sampling):
    params = SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, **sampling})
    request = engine.builder.build(prompt, RequestOptions(params, reuse))
    engine.add(request)
    return request.request_id


def run(engine, *, preempt=()):
    """Outputs by request; each of `preempt` is preempted in its prefill, if that takes pieces, and behind some tokens."""
    outputs, victims = {}, {(name, stage) for name in preempt for stage in (True, False)}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if event.part.output is not None:
                outputs[event.request_id] = event.part.output
        for active in list(engine.scheduler.running):
            stage = (active.request.request_id, active.is_prefilling)
            if stage in victims and (active.is_prefilling or len(active.output_ids) > 3):
                victims.remove(stage)
                engine.scheduler.preempt(active)
    assert all(is_prefilling for _, is_prefilling in victims)
    engine.check()
    return outputs


def answer(engine, prompt, reuse="off", **sampling):
    name = submit(engine, prompt, reuse, **sampling)
    return run(engine)[name]


@pytest.fixture(scope="module")
def lone():
    """An engine that is asked without reuse, one request at a time."""
    return make_engine(max_rows=4096)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_token_ids": BAD_IDS}, {"bad_words_ids": [list(ids) for ids in BAD_IDS]}),
        (
            {"min_tokens": 6, "logit_bias": ((END, 50.0),), "ignore_eos": False},
            {"min_new_tokens": 6, "sequence_bias": {(END,): 50.0}},
        ),
        (
            {"repetition_penalty": 1.8, "bad_token_ids": BAD, "logit_bias": ((7, 1.0), (8, -1.0))},
            {
                "repetition_penalty": 1.8,
                "bad_words_ids": [list(ids) for ids in BAD],
                "sequence_bias": {(7,): 1.0, (8,): -1.0},
            },
        ),
    ],
    ids=["repetition", "bad words", "min tokens", "together"],
)
def test_greedy_answers_are_those_of_transformers(lone, ours, theirs):
    for seed in range(3):
        prompt = words(60, seed)
        found = answer(lone, prompt, **ours).token_ids
        with lone.adapter.stock() as model, torch.inference_mode():
            ids = torch.from_numpy(prompt)[None]
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **theirs
            )
        assert found == tuple(expected[0, len(prompt) :].tolist())


def asked(seed):
    """A prompt that has the document behind another head than anybody else's."""
    return np.concatenate([words(23, seed), DOCUMENT, words(9, seed + 100)])


@pytest.fixture(scope="module")
def expected(lone):
    """Answers without reuse, each request alone."""
    return {
        (rules, seed): answer(lone, asked(seed), **RULES[rules]).token_ids for rules in RULES for seed in range(10, 14)
    }


@pytest.mark.parametrize("is_preempted", [False, True], ids=["", "preempted"])
@pytest.mark.parametrize("rules", RULES)
def test_the_answer_is_that_of_a_lone_request_without_reuse(expected, rules, is_preempted):
    engine = make_engine()
    answer(engine, np.concatenate([words(7, 1), DOCUMENT]), "graft", max_new_tokens=1)
    answer(engine, asked(12), "exact", **RULES[rules])
    modes = {10: "off", 11: "verified", 12: "exact", 13: "verified"}
    names = {seed: submit(engine, asked(seed), mode, **RULES[rules]) for seed, mode in modes.items()}
    outputs = run(engine, preempt=names.values() if is_preempted else ())
    for seed, name in names.items():
        assert outputs[name].token_ids == expected[rules, seed], modes[seed]
        assert outputs[name].num_preemptions >= is_preempted
    if not is_preempted:
        assert outputs[names[11]].report.healing.drafted_tokens > 0
        assert outputs[names[12]].report.exact_tokens > 150


def test_a_graft_that_finds_nothing_answers_alike(lone):
    engine = make_engine()
    for rules in RULES.values():
        assert answer(engine, asked(20), "graft", **rules).token_ids == answer(lone, asked(20), **rules).token_ids
        engine.reset()


@pytest.mark.parametrize("rules", RULES)
def test_drafts_see_the_rules_that_the_answer_sees(rules):
    """All of the graft is computed again before anything is drafted: a draft that is wrong forgot a rule."""
    engine = make_engine()
    answer(engine, np.concatenate([words(7, 1), DOCUMENT]), "graft", max_new_tokens=1)
    params = SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, **RULES[rules]})
    request = engine.builder.build(asked(10), RequestOptions(params, "verified", selection=FirstK(len(DOCUMENT))))
    engine.add(request)
    healing = run(engine)[request.request_id].report.healing
    assert healing.drafted_tokens > 3
    assert healing.retracted_tokens == 0


class NothingLeft:
    """A sampler of drafts that have come to an end that the answer need not come to."""

    may_draw = 0

    def sample(self, logits):
        if not self.may_draw:
            raise NothingToDrawError("nothing")
        self.may_draw -= 1
        return int(logits.argmax())


@pytest.mark.parametrize("may_draw", [0, 2])
def test_drafts_that_have_nothing_to_draw_fail_no_request(lone, monkeypatch, may_draw):
    drafting = NothingLeft()
    drafting.may_draw = may_draw
    monkeypatch.setattr(Sampler, "fork", lambda self: drafting)
    engine = make_engine()
    answer(engine, np.concatenate([words(7, 1), DOCUMENT]), "graft", max_new_tokens=1)
    output = answer(engine, asked(10), "verified")
    assert output.report.healing.drafted_tokens == may_draw
    assert output.token_ids == answer(lone, asked(10)).token_ids


def test_rules_that_leave_nothing_end_their_own_request_alone(lone):
    dead = submit(lone, words(20, 1), "off", allowed_token_ids=(7,), bad_token_ids=((7, 7),))
    alive = submit(lone, words(20, 1), "off")
    outcomes = {}
    while lone.has_work:
        outcomes |= {event.request_id: event for event in lone.step()}
    assert isinstance(outcomes[dead].error, NothingToDrawError)
    assert "leave no token" in str(outcomes[dead].error)
    assert len(outcomes[alive].part.output.token_ids) == NEW
    lone.check()


def test_penalties_of_a_turn_count_all_that_its_session_holds(lone):
    llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=2_000)
    session = llm.open_session()
    params = SamplingParams(NEW, ignore_eos=True, repetition_penalty=1.9, bad_token_ids=BAD)
    first = llm.generate(words(40, 1), params, session_id=session)[0]
    second = llm.generate(words(5, 2), params, "exact", session_id=session, append=True)[0]
    whole = np.concatenate([words(40, 1), first.token_ids, words(5, 2)])
    assert second.report.exact_tokens > 40
    assert second.token_ids == answer(lone, whole, repetition_penalty=1.9, bad_token_ids=BAD).token_ids


def test_stop_tokens_end_the_output_also_where_end_of_text_does_not(lone):
    free = answer(lone, words(30, 4), repetition_penalty=2.0).token_ids
    stopped = answer(lone, words(30, 4), repetition_penalty=2.0, stop_token_ids=(free[5], 499))
    assert stopped.token_ids == free[: free.index(free[5]) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_min_tokens_hold_both_kinds_of_end_back(lone):
    sampling = {"logit_bias": ((END, 50.0), (9, 60.0)), "stop_token_ids": (9,), "ignore_eos": False}
    assert answer(lone, words(30, 4), **sampling).token_ids == (9,)
    output = answer(lone, words(30, 4), min_tokens=6, **sampling)
    assert len(output.token_ids) == 7
    assert output.token_ids[-1] == 9
    assert not {END, 9} & set(output.token_ids[:-1])


def test_end_of_text_tokens_that_the_model_does_not_have_are_nothing_to_hold_back():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [END, VOCABULARY + 7]
    llm = LLM(adopt_model("llama", model, None), num_slots=300)
    assert llm.eos_token_ids == {END}
    output = llm.generate(words(9, 1), SamplingParams(4, min_tokens=2, logit_bias=((END, 50.0),)))[0]
    assert len(output.token_ids) == 3


def test_what_ended_the_output_is_in_its_text_if_it_is_to_be(model_dir):
    llm = LLM(model_dir, num_slots=1_000)
    tokenizer = llm.loaded.tokenizer
    free = llm.generate("one two three", SamplingParams(12, ignore_eos=True, repetition_penalty=2.0))[0]
    params = SamplingParams(12, repetition_penalty=2.0, stop_token_ids=(free.token_ids[6],))
    for include in (False, True):
        output = llm.generate("one two three", replace(params, include_stop=include))[0]
        shown = output.token_ids if include else output.token_ids[:-1]
        assert output.text == tokenizer.decode(shown, skip_special_tokens=True)
    end = tokenizer.eos_token_id
    ended = SamplingParams(12, logit_bias=((end, 90.0),), stop_token_ids=(end,), include_stop=True)
    assert llm.generate("one", ended)[0].text == ""
    assert llm.generate("one", replace(ended, skip_special_tokens=False))[0].text == tokenizer.eos_token
    llm.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_token_ids": (VOCABULARY,)},
        {"allowed_token_ids": (3, VOCABULARY)},
        {"bad_token_ids": ((3,), (4, VOCABULARY))},
        {"logit_bias": ((VOCABULARY, 1.0),)},
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(lone, wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} has token id 500; this model's lie in \[0, 500\)"):
        submit(lone, words(5, 1), "off", **wrong)


def test_a_longer_output_than_there_may_be_is_refused(lone):
    with pytest.raises(ConfigError, match="min_tokens is 20 and max_new_tokens 14"):
        submit(lone, words(5, 1), "off", min_tokens=20)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text"])
def test_prompt_logprobs_are_those_of_a_full_prefill(family):
    """In pieces, beside others, preempted, and with everything of the prompt cached."""
    engine = make_engine(family)
    answer(engine, np.concatenate([words(7, 1), DOCUMENT]), "graft", max_new_tokens=1)
    answer(engine, asked(11), "exact", max_new_tokens=1)
    modes = {10: "off", 11: "exact", 12: "graft", 13: "verified"}
    names = {
        seed: submit(engine, asked(seed), mode, prompt_logprobs=seed - 10, repetition_penalty=1.4)
        for seed, mode in modes.items()
    }
    submit(engine, asked(14), "verified", repetition_penalty=1.4)
    outputs = run(engine, preempt=[names[12], names[13]])
    for seed, name in names.items():
        assert_scored(engine.adapter, outputs[name], seed - 10)
        report = outputs[name].report
        assert (report.reused_tokens, report.computed_tokens, report.healing) == (0, 182, None)
        assert report.miss.reason is MissReason.REUSE_OFF
        assert outputs[name].token_ids == answer(engine, asked(seed), repetition_penalty=1.4).token_ids
    again = answer(engine, asked(12), "exact")
    assert again.report.exact_tokens > 100, "what such a request computes is kept as any other's"
    assert again.prompt_logprobs is None


def test_the_first_part_tells_what_is_known_of_the_prompt(lone):
    name = submit(lone, words(30, 3), "off", max_new_tokens=3, prompt_logprobs=1)
    parts = []
    while lone.has_work:
        parts += [event.part for event in lone.step() if event.request_id == name]
    first, *others = parts
    assert np.array_equal(first.prompt.token_ids, words(30, 3))
    assert first.prompt.logprobs == parts[-1].output.prompt_logprobs
    assert [part.prompt for part in others] == [None, None]


def test_logits_of_few_rows_are_held_at_a_time(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_ROWS", 24)
    engine = make_engine(max_rows=4096)
    forward, most = engine.adapter.forward, []

    def watched(batch):
        most.append(sum(rows.num_logits for rows in batch))
        return forward(batch)

    monkeypatch.setattr(engine.adapter, "forward", watched)
    names = [submit(engine, words(50, seed), "off", prompt_logprobs=1) for seed in range(4)]
    others = [submit(engine, words(50, seed), "off", max_new_tokens=2) for seed in range(4, 8)]
    outputs = run(engine)
    assert 24 <= max(most) <= 24 + len(names + others)
    for name in names:
        assert_scored(engine.adapter, outputs[name], 1)


def test_a_prompt_behind_scored_ones_is_computed_beside_them(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_ROWS", 24)
    engine = make_engine(max_rows=4096)
    scored = [submit(engine, words(50, seed), "off", prompt_logprobs=1) for seed in range(3)]
    plain = submit(engine, words(40, 9), "off", max_new_tokens=1)
    finished = {event.request_id for event in engine.step() if event.part.output is not None}
    assert finished == {plain}
    outputs = run(engine)
    for name in scored:
        assert_scored(engine.adapter, outputs[name], 1)
