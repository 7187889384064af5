"""Any call of ours that fails in the workers' half costs grafts and donors; no answer, no later graft and no engine.

In one engine the script is played again and again; in each run one call of ours, or of numpy by us, fails with MemoryError
within `load`, `save` or `take_report` of the worker.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from tests.support.failing_calls import CallDrill, EscapedError, FailingCalls, drawn

from engines import Answer, Engine, engine, text

_FEW = int(os.environ.get("DRILL_POINTS", "25"))
"""Points of one kind of engine; there are some 600 of each kind."""
_WATCHED = ("load", "save", "take_report")
KINDS = {
    "synchronous, repaired before": {"load": "sync", "repair": "before"},
    "asynchronous, repaired after": {"load": "async", "repair": "after"},
}
DOCUMENT, OTHER = text(5, 128), text(6, 96)
HEAD, QUESTION = text(1, 20), text(3, 16)
PLAIN = HEAD + DOCUMENT + text(7, 12)
GRAFTED = text(2, 30) + DOCUMENT + QUESTION
TWICE = text(8, 16) + OTHER + text(9, 10) + DOCUMENT[20:] + QUESTION
RESET = text(12, 18) + DOCUMENT + text(13, 9)
LATER = text(10, 25) + DOCUMENT + text(11, 12)


@dataclass
class WorkerDrill(CallDrill):
    """A script in which one call of the worker's half fails."""

    served: Engine
    full: dict[str, Answer] = field(init=False)

    def __post_init__(self) -> None:
        prompts = {"plain": PLAIN, "grafted": GRAFTED, "twice": TWICE, "reset": RESET, "later": LATER}
        self.full = {name: self.served.cold(prompt) for name, prompt in prompts.items()}

    def is_guarded(self, place) -> bool:
        """Whether a failure there is to be caught: not one of the connector itself, which hands calls over."""
        return place.caller.startswith("/integrations/vllm/worker/")

    def run(self, calls: FailingCalls) -> list[str]:
        served, wrong = self.served, []
        served.forget_donors()
        served.scheduler.counts.num_errors = 0
        try:
            with watched(served.worker, calls):
                self.script()
            self.aftermath()
        except (EscapedError, AssertionError) as error:
            wrong.append(repr(error.__cause__ or error))
        return wrong

    def script(self) -> None:
        """Exact answers are those of a full prefill, and so are those of prompts that were computed in place of a graft."""
        served = self.served
        served.donate(HEAD + DOCUMENT + QUESTION, OTHER)
        served.ask(PLAIN, "exact").assert_like(self.full["plain"])
        for name, prompt in (("grafted", GRAFTED), ("twice", TWICE)):
            answer = served.ask(prompt)
            if not answer.report["shifted_tokens"] and not answer.report["continued_tokens"]:
                answer.assert_like(self.full[name])
        served.ask(GRAFTED, "exact").assert_like(self.full["grafted"])
        served.llm.reset_prefix_cache(reset_connector=True)
        answer = served.ask(RESET)
        assert not answer.shifted, "donors outlive a reset"
        answer.assert_like(self.full["reset"])

    def aftermath(self) -> None:
        served = self.served
        served.check()
        served.llm.reset_prefix_cache()
        served.ask(TWICE, "exact").assert_like(self.full["twice"])
        served.donate(HEAD + DOCUMENT + QUESTION)
        answer = served.ask(LATER)
        assert answer.shifted > 60, answer.report
        served.ask(LATER, "exact").assert_like(self.full["later"])
        served.check()


@contextmanager
def watched(worker, calls):
    """Watch the calls within those that vLLM makes of a worker."""
    with contextlib.ExitStack() as stack:
        for name in _WATCHED:
            setattr(worker, name, _watched(getattr(worker, name), calls))
            stack.callback(delattr, worker, name)
        yield


def _watched(method, calls):
    def call(*given, **named):
        try:
            with calls:
                return method(*given, **named)
        except Exception as error:
            raise EscapedError from error

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_costs_grafts_and_donors_alone(model_folder, kind):
    options = {"selection": "first_k", "min_saved_tokens": 0, **KINDS[kind]}
    with engine(model_folder, "llama", options=options, num_gpu_blocks_override=300) as served:
        drill = WorkerDrill(served)
        points = drill.places()
        found = {point: wrong for point in drawn(points, _FEW) if (wrong := drill.failures(*point))}
    assert len(points) > 100
    assert not found
