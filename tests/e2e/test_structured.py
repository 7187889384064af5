"""Structured output from an engine: valid, and the same whatever is reused and whoever else runs."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref

import jsonschema
import numpy as np
import pytest
from tests.support.schemas import SCHEMAS

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, FinishReason, SamplingParams, StructureSpec
from kvgraft.engine.core import Engine
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.sampling.grammar_state import GrammarState
from kvgraft.engine.sampling.grammars import Grammars
from kvgraft.errors import ConfigError, StructureError
from kvgraft.observability import NullRecorder
from kvgraft.reuse.repair_time import CONSTRAINED
from kvgraft.types import RepairTime

SCHEMA = SCHEMAS["numbers"]
SPEC = StructureSpec.json_schema(SCHEMA)
EXPLODING = StructureSpec.grammar('start: a{100000}\na: b{100000}\nb: "x"{100000}')


SETTINGS = {"num_slots": 3_000, "max_rows": 64, "host_bytes": 0}


@pytest.fixture(scope="module")
def llm():
    return LLM("graft-tiny", **SETTINGS)


@pytest.fixture(scope="module")
def engine(llm):
    """Asked one request at a time where answers are compared."""
    return llm.engine


@pytest.fixture(scope="module")
def busy():
    """Has read the document behind another head."""
    engine = Engine("graft-tiny", EngineConfig(**SETTINGS))
    submit(engine, np.concatenate([words(7, 1), DOCUMENT]), "graft", max_new_tokens=1)
    run(engine)
    return engine


def words(count, seed):
    return np.random.default_rng(seed).integers(3, 4_000, count)


DOCUMENT = words(150, 0)


def asked(seed):
    """A prompt that has the document behind another head than anybody else's."""
    return np.concatenate([words(23, seed), DOCUMENT, words(9, seed + 100)])


def submit(engine, prompt, reuse="off", **sampling):
    params = SamplingParams(**{"max_new_tokens": 60, "temperature": 1.0, "seed": 3, "structure": SPEC, **sampling})
    request = engine.builder.build(prompt, RequestOptions(params, reuse))
    engine.add(request)
    return request.request_id


def run(engine, *, preempt=()):
    """Outputs, or errors, by request; each of `preempt` is preempted behind some tokens."""
    ended, waiting = {}, set(preempt)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None or event.part.output is not None:
                ended[event.request_id] = event.error or event.part.output
        for active in list(engine.scheduler.running):
            if active.request.request_id in waiting and len(active.output_ids) > 3 and not active.is_prefilling:
                waiting.remove(active.request.request_id)
                engine.scheduler.preempt(active)
    assert not waiting
    engine.check()
    return ended


def test_llm_generates_what_the_schema_says(llm):
    for seed in range(4):
        (output,) = llm.generate(
            "Tell me a number.", SamplingParams(max_new_tokens=120, temperature=1.0, seed=seed, structure=SPEC)
        )
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), SCHEMA)


def test_greedy_requests_of_many_structures_at_once(engine):
    specs = {
        "regex": StructureSpec.regex("[a-f]{3}-[0-9]{2}"),
        "choice": StructureSpec.choice(["yes", "no", "perhaps"]),
        "grammar": StructureSpec.grammar('start: "a" ("b" | "c"){3} "."'),
        "parts": StructureSpec.parts([{"text": "<call>"}, {"schema": {"enum": [1, 2]}}, {"text": "</call>"}]),
    }
    patterns = {
        "regex": "[a-f]{3}-[0-9]{2}",
        "choice": "yes|no|perhaps",
        "grammar": r"a[bc]{3}\.",
        "parts": r"<call>[12]</call>",
    }
    names = {kind: submit(engine, words(20, 5), temperature=0.0, structure=spec) for kind, spec in specs.items()}
    free = submit(engine, words(20, 5), temperature=0.0, structure=None)
    ended = run(engine)
    for kind, name in names.items():
        assert re.fullmatch(patterns[kind], ended[name].text)
        assert ended[name].finish_reason is FinishReason.STOP
    alone = submit(engine, words(20, 5), temperature=0.0, structure=None)
    assert run(engine)[alone].token_ids == ended[free].token_ids


@pytest.mark.parametrize("is_preempted", [False, True], ids=["", "preempted"])
def test_the_answer_is_that_of_a_lone_request_without_reuse(engine, busy, is_preempted):
    expected, first = {}, 30 if is_preempted else 10
    for seed in range(first, first + 4):
        name = submit(engine, asked(seed))
        expected[seed] = run(engine)[name].token_ids
    modes = zip(expected, ("off", "verified", "exact", "verified"), strict=True)
    names = {seed: submit(busy, asked(seed), mode) for seed, mode in modes}
    outputs = run(busy, preempt=names.values() if is_preempted else ())
    assert {seed: outputs[name].token_ids for seed, name in names.items()} == expected
    assert any(outputs[name].report.healing is not None for name in names.values())


def test_grafted_answers_are_of_the_schema_too(busy):
    name = submit(busy, asked(20), "graft", max_new_tokens=200)
    output = run(busy)[name]
    assert output.report.reused_tokens > 0
    jsonschema.validate(json.loads(output.text), SCHEMA)


def test_the_token_limit_cuts_it_with_reason_length(engine):
    name = submit(engine, words(20, 5), max_new_tokens=3)
    output = run(engine)[name]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 3)


def test_min_tokens_gives_way_where_nothing_but_the_end_may_follow(engine):
    name = submit(engine, words(20, 5), structure=StructureSpec.choice(["no"]), min_tokens=50)
    output = run(engine)[name]
    assert (output.text, output.finish_reason) == ("no", FinishReason.STOP)


def test_ignore_eos_is_refused_beside_a_structure(engine):
    with pytest.raises(ConfigError, match="leave out one of them"):
        engine.builder.build(words(5, 0), RequestOptions(SamplingParams(ignore_eos=True, structure=SPEC)))


def test_a_structure_that_cannot_be_followed_fails_its_request_alone(engine):
    broken, other = submit(engine, words(20, 5), structure=EXPLODING), submit(engine, words(20, 5))
    ended = run(engine)
    assert isinstance(ended[broken], StructureError)
    assert str(ended[broken]).startswith("the structure cannot be followed further")
    assert "simplify it" in str(ended[broken])
    jsonschema.validate(json.loads(ended[other].text), SCHEMA)


PATTERNS = {f"p{number}": {"type": "string", "pattern": f"^[a-z]{{1,{number % 9 + 1}}}x?$"} for number in range(500)}
TOO_MUCH = {
    "many properties with patterns": StructureSpec.json_schema({"type": "object", "properties": PATTERNS}),
    "one that explodes": EXPLODING,
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_a_structure_asks_too_much_of_is_the_request_s_own_fault(engine, caplog, name):
    """Nothing is logged as a failure of the engine, or counted as one."""
    usual, engine._recording._recorder = engine._recording._recorder, Outcomes()
    try:
        number = submit(engine, words(20, 5), structure=TOO_MUCH[name])
        ended, outcomes = run(engine)[number], engine._recording._recorder.outcomes
    finally:
        engine._recording._recorder = usual
    assert isinstance(ended, StructureError)
    assert outcomes == ["refused"]
    assert not [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}]


class Outcomes(NullRecorder):
    """Keeps how requests ended."""

    def __init__(self):
        self.outcomes = []

    def record_request(self, record):
        self.outcomes.append(record.outcome)


def test_a_backend_that_panics_fails_its_request_alone(engine):
    broken = submit(engine, words(20, 5), structure=StructureSpec.choice(["abcdef"]))
    other = submit(engine, words(20, 5))
    state = engine._active[broken]._sampler._structure

    class Panicking:
        def deep_copy(self):
            raise SystemExit("panic")

    here = state._here.result()
    state._here = type(state._here).done(here._replace(matcher=Panicking()))
    ended = run(engine)
    assert isinstance(ended[broken], StructureError)
    jsonschema.validate(json.loads(ended[other].text), SCHEMA)


def test_cancelled_and_finished_requests_leave_no_state(engine):
    finished, cancelled = submit(engine, words(20, 5)), submit(engine, words(20, 6), max_new_tokens=500)
    states = [weakref.ref(active._sampler._structure) for active in engine._active.values()]
    assert all(isinstance(state(), GrammarState) for state in states)
    for _ in range(6):
        engine.step()
    assert engine.cancel(cancelled)
    run(engine)
    gc.collect()
    assert [state() for state in states] == [None, None]
    assert finished


def test_without_the_extra_it_says_what_to_install(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(engine.builder, "_grammars", Grammars(engine.loaded, engine.eos_token_ids))
    with pytest.raises(ConfigError, match=r"pip install 'kvgraft\[structured\]'"):
        engine.builder.build(words(5, 0), RequestOptions(SamplingParams(structure=SPEC)))


@pytest.mark.parametrize(
    ("structure", "waits"),
    [
        (StructureSpec.choice(["yes", "no"]), True),
        (StructureSpec.regex("(yes|no)"), True),
        (StructureSpec.grammar('start: "yes" | "no"'), True),
        (StructureSpec.json_object(), False),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_first_token_that_decides_waits_for_the_repair(structure, waits):
    llm = LLM("graft-tiny", num_slots=2_000, heal="off", repair_below_margin=0)
    document = "".join(f"{each * 7919 % 1013} is kept in hall {each * 31 % 17}.\n" for each in range(30))
    llm.generate(document, SamplingParams(1))
    repair = llm.generate("Read. " + document + "Is it?", SamplingParams(4, structure=structure))[0].report.repair
    assert (repair.time, repair.reason) == ((RepairTime.BEFORE, CONSTRAINED) if waits else (RepairTime.AFTER, ""))
