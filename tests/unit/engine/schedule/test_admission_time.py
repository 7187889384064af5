"""What an admission takes counts against the step's budget of prefill where a stream runs beside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.schedule import scheduler as scheduler_module
from kvgraft.engine.schedule.pace import Pace
from kvgraft.testing.tiny_models import tiny_model

PROMPT = [(11 * i) % 60 + 3 for i in range(900)]


class Clock:
    """Stands still but while a prompt is admitted."""

    def __init__(self, monkeypatch, engine, admission_s):
        self.now = 100.0
        admit = engine.scheduler._admit

        def timed(failed):
            self.now += admission_s
            return admit(failed)

        monkeypatch.setattr(engine.scheduler, "_admit", timed)
        monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(perf_counter=lambda: self.now))


def add(engine, prompt, max_tokens=64):
    engine.add(engine.builder.build(prompt, RequestOptions(SamplingParams(max_tokens, ignore_eos=True))))


@pytest.mark.parametrize(("admission_s", "goes_at_once"), [(0.0, True), (10.0, False)])
def test_rows_of_a_prompt_wait_where_its_admission_took_what_streams_bear(monkeypatch, admission_s, goes_at_once):
    engine = Engine(adopt_model("llama", tiny_model("llama"), None), EngineConfig(num_slots=4_000))
    add(engine, PROMPT[:40])
    engine.step()
    monkeypatch.setattr(Pace, "prefill_flops", lambda *_: 1e9)
    monkeypatch.setattr(Pace, "flops_beside", lambda _, seconds: 1e9 * seconds)
    add(engine, PROMPT)
    Clock(monkeypatch, engine, admission_s)
    step = engine.scheduler.schedule()
    assert (step.num_streams, step.admission_s) == (1, admission_s)
    assert bool(step.prefill_rows) is goes_at_once
    assert bool(step.prefill_flops) is goes_at_once
    if not goes_at_once:
        assert engine.scheduler.schedule().prefill_rows, "the next step has its rows"


def test_a_prompt_that_runs_alone_goes_at_once(monkeypatch):
    engine = Engine(adopt_model("llama", tiny_model("llama"), None), EngineConfig(num_slots=4_000))
    add(engine, PROMPT)
    Clock(monkeypatch, engine, 10.0)
    assert engine.scheduler.schedule().prefill_rows
