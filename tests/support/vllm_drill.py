"""Requests through the scheduler's half of the vLLM connector, in which one call fails, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass

import pytest
from tests.support.failing_calls import CallDrill, EscapedError, FailingCalls, Watched, same_secret
from tests.unit.integrations.vllm.stand_ins import BLOCK, Engine, Request, Shelf, ShelfFeed

from kvgraft.config import VLLMConfig
from kvgraft.integrations.vllm.scheduler import EngineFacts, GraftScheduler

KINDS = {"sync": "sync", "async": "async", "store": "auto"}
"""By how grafts are made, and where donors are; `load` of each."""
_SCHEDULER = "kvgraft.integrations.vllm.scheduler"
_DOCUMENTS = [random.Random(seed).choices(range(1000), k=70) for seed in range(3)]
_MOST_STEPS = 300
_CALLS = ("match", "admit", "commands", "receive", "finish", "reset", "sources", "step_ended")


@dataclass
class Drill(CallDrill):
    """A kind of engine."""

    kind: str

    def run(self, calls: FailingCalls) -> list[str]:
        with same_secret(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvgraft.integrations.vllm.scheduler.stores.StoreFeed", ShelfFeed)
            return _Run(self.kind, calls, patch).failures()


class _Run:
    def __init__(self, kind: str, calls: FailingCalls, patch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        shelf = Shelf() if kind == "store" else None
        self.graft = Watched(self._scheduler(shelf, patch), _CALLS, calls)
        self.engine = Engine(self.graft, shelf)
        self.names = iter(range(10**6))

    def _scheduler(self, shelf, patch) -> GraftScheduler:
        patch.setattr(f"{_SCHEDULER}.graft_scheduler.configured_stores", lambda _: () if shelf is None else (shelf,))
        facts = EngineFacts(
            fingerprint="model",
            block_sizes=(BLOCK,),
            hash_block_size=BLOCK,
            window=0,
            capacity_tokens=700,
            hidden_size=64,
            output_chunk=8,
            refusal="",
            host_tokens=None if shelf is None else 400,
        )
        config = VLLMConfig(
            load=KINDS[self.kind],
            selection="first_k",
            min_run=16,
            min_saved_tokens=0,
            max_generation=2,
            lookup_deadline_ms=1e9,
        )
        return GraftScheduler(config, facts)

    def failures(self) -> list[str]:
        wrong = []
        try:
            try:
                self.script()
            finally:
                self.graft.calls = contextlib.nullcontext()
            self.aftermath()
        except EscapedError as error:
            wrong.append(f"a: {error.__cause__!r}")
        except Exception as error:  # noqa: BLE001 - a finding
            wrong.append(f"b: {error!r}")
        return wrong

    def script(self) -> None:
        a, b, c = _DOCUMENTS
        for document in (a, b, c):
            self.serve([*document, 1, 2], 2, "exact")
        self.serve([*self.new(60), *a, *self.new(40)], 12)
        self.serve([*self.new(30), *c[:50], *self.new(20), *b, *self.new(20)], 4, chunk=60)
        first = self.serve([*self.new(60), *b, *self.new(30)], 30)
        self.serve([*first.all_token_ids, *self.new(40), *a, *self.new(9)], 4)
        self.serve([*first.all_token_ids, *self.new(20)], 4)
        for fate in ("fails", "falls back", "loses text"):
            self.serve([*self.new(50), *a[5:], *self.new(20)], 3, fate=fate)
        preempted = self.ask([*self.new(60), *c, *self.new(40)], 30)
        self.run(4)
        if preempted in self.engine.running and not preempted.waits:
            self.engine.preempt(preempted)
        aborted = self.ask([*self.new(20), *b, *self.new(10)], 30)
        self.run(3, fate="slow")
        if aborted in self.engine.running or aborted in self.engine.waiting:
            self.engine.end(aborted)
        self.finish()
        running = self.ask([*self.new(60), *a, *self.new(40)], 20)
        waiting = self.ask([*self.new(60), *b, *self.new(40)], 20)
        self.run(2)
        self.engine.epoch += 1
        self.graft.reset(prefixes_are_gone=False)
        self.finish()
        assert running.num_tokens > running.num_prompt_tokens < waiting.num_tokens
        self.engine.cache.clear()
        self.graft.reset(prefixes_are_gone=True)
        for document in (a, b):
            self.serve([*document, *self.new(3)], 2, "exact")
        self.serve([*self.new(60), *a, *b, *self.new(40)], 30)

    def aftermath(self) -> None:
        """Serve further requests, exact ones and such that graft; check between them."""
        self.finish()
        self.graft.check()
        a, b, c = _DOCUMENTS
        for document in (a, c, b):
            self.serve([*document, *self.new(3)], 2, "exact")
            self.graft.check()
        self.engine.cache.clear()  # what no donor has is captured again
        for document in (b, c):
            self.serve([*self.new(48), *document, *self.new(5)], 2, "exact")
        grafted = self.serve([*self.new(60), *b, *self.new(40)], 20)
        assert grafted.worst_copied, "later requests are not grafted"
        self.graft.check()
        for document in (a, c):
            self.serve([*document, *self.new(30)], 2, "exact")
        self.run(2)
        self.graft.check()
        registry, workers = self.graft.registry, self.engine.workers
        assert self.graft.num_states == 0, "requests are left"
        assert registry.reserved_tokens == 0, "room is kept for nothing"
        assert not workers.texts, "workers keep texts of nobody"
        assert not workers.unrepaired, "workers keep what was to be repaired of nobody"
        assert not workers.jobs
        donors = {donor.donor_id for donor in registry.catalogue}
        assert workers.donors.keys() <= donors, "workers keep donors that nobody knows"
        if self.kind != "store":
            assert workers.donors.keys() == donors, "donors are known that workers do not have"
        for donor_id, held in workers.donors.items():
            donor = registry.catalogue.get(donor_id)
            assert [truth.token for truth in held] == donor.token_ids.tolist()
            assert donor.generation >= max(truth.depth for truth in held)

    def new(self, count: int) -> list[int]:
        return [1000 + next(self.names) for _ in range(count)]

    def ask(self, tokens, answer: int, mode: str = "graft") -> Request:
        request = Request(str(next(self.names)), tokens, {"kvgraft": mode}, answer)
        self.engine.add(request)
        return request

    def serve(self, tokens, answer: int, mode: str = "graft", **how) -> Request:
        request = self.ask(tokens, answer, mode)
        self.finish(**how)
        if mode == "exact":
            assert not request.worst_copied
        return request

    def run(self, steps: int, *, fate: str = "", chunk: int = 400) -> None:
        self.engine.fate = fate
        for _ in range(steps):
            self.engine.step(room=True, chunk=chunk)

    def finish(self, **how) -> None:
        for _ in range(_MOST_STEPS):
            if not (self.engine.running or self.engine.waiting):
                return
            self.run(1, **how)
        raise AssertionError("a request does not end")
