"""Clients that leave, by the thousand and at every stage, in SGLang's own scheduler over a model that keeps an account.

Both are reports about SGLang with other caches (docs/reports.md). SGLang's memory check runs after every step.
"""

from __future__ import annotations

import collections

import pytest
from loop import Loop, build_scheduler
from test_slots import DOCUMENTS, fresh, take

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

NUM_ABORTED = 2_300
"""Of each kind of loop: 4,600 in all, as the report has."""
CROWD = 12
"""Requests at once, four more than run."""


@pytest.fixture(scope="module")
def loop(model_dir, tmp_path_factory):
    settings = {
        "host_bytes": 128 << 10,
        "phase_cost_tokens": 1,
        "lookup_deadline_ms": 1e9,
        "state_dir": tmp_path_factory.mktemp("state"),
    }
    return Loop(build_scheduler(model_dir("llama-1-layer"), settings, 4))


@pytest.fixture(autouse=True)
def strict(loop, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    loop.reset()


def stage_of(loop, rid):
    """Where a request is."""
    scheduler = loop.scheduler
    if scheduler.chunked_req is not None and scheduler.chunked_req.rid == rid:
        return "between chunks"
    for req in scheduler.waiting_queue:
        if req.rid == rid:
            return "retracted" if req.output_ids else "queued"
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    return "running" if any(req.rid == rid for batch in batches for req in batch.reqs) else "gone"


class Leavers:
    """Requests that leave after up to 24 rounds; everything that runs is retracted now and then."""

    def __init__(self, count):
        self.left, self.number, self.here, self.round = count, 0, {}, 0
        self.stages, self.tokens = collections.Counter(), fresh()

    def __call__(self, loop):
        self.round += 1
        if self.round % 7 == 0:
            loop.retract()
        for rid, rounds in list(self.here.items()):
            self.here[rid] = rounds - 1
            if not rounds:
                self.stages[stage_of(loop, rid)] += 1
                loop.abort(rid)
                del self.here[rid]
        while self.left and len(self.here) < CROWD:
            self.come(loop)
        return not self.here and not self.left

    def come(self, loop):
        self.left, self.number = self.left - 1, self.number + 1
        document = DOCUMENTS[self.number % 3]
        rid, first = f"request {self.number}.", self.number % 30
        prompt = take(self.tokens, 5 + self.number % 9) + document[first : first + 80] + take(self.tokens, 9)
        loop.submit(rid, prompt, 60, repair=("after", "before")[self.number % 2])
        self.here[rid] = self.number * 7 % 24


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_thousands_of_aborted_requests_leave_nothing(loop, overlap):
    """sglang#40360, #37103, #20182, #36377: an abort between match and load, or in the queue, leaks locks, lookups and slots.

    There the scheduler ends with "pool memory leak". Here its count holds after every step, no request is left in our table
    and every slot can be freed.
    """
    leavers = Leavers(NUM_ABORTED)
    loop.submit("donor.", [*take(leavers.tokens, 5), *DOCUMENTS[0]], 2)
    loop.run(leavers, overlap=overlap, chunk=64)
    for stage in ("queued", "between chunks", "running", "retracted"):
        assert leavers.stages[stage] >= 5, leavers.stages
    assert loop.reuse.books.num_requests == 0
    assert loop.reuse.books.log.num_errors == 0
    assert not loop.reuse.repairs.waiting
    assert loop.num_repaired > 0
    loop.evict(10_000)
    allocator = loop.scheduler.token_to_kv_pool_allocator
    assert allocator.available_size() == allocator.size


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("reuse", ["graft", "off"])
@pytest.mark.parametrize("pause", [0, 2], ids=["at once", "later"])
def test_prompt_is_aborted_and_sent_again(loop, pause, reuse, overlap):
    """vllm#56525, #37152, in SGLang: what was announced of an aborted prompt is read by the same prompt sent again.

    There nobody had written it. Here the account raises if a slot is read whose pass has not run; the prompt has 230 tokens
    in chunks of 32, and is aborted after each of its first nine steps.
    """
    tokens = fresh()
    for stays in range(9):
        loop.reset()
        prompt = [*take(tokens, 60), *DOCUMENTS[0], *take(tokens, 50)]
        loop.submit("donor.", [*take(tokens, 5), *DOCUMENTS[0]], 2)
        rounds = collections.deque([[]] * 6 + [["first."]] + [[]] * stays + [["abort"]] + [[]] * pause + [["second."]])

        was_answered = []

        def act(loop, rounds=rounds, prompt=prompt, was_answered=was_answered):
            for what in rounds.popleft() if rounds else ():
                was_answered += loop.reports() if what == "abort" else ()
                loop.abort("first.") if what == "abort" else loop.submit(what, prompt, 3, reuse=reuse)
            return not rounds

        loop.run(act, overlap=overlap, chunk=32)
        report = loop.reports()["second."]
        is_whole = "first." in was_answered
        assert (report["shifted_tokens"] > 0) == (reuse == "graft" and not is_whole)
        assert (report["continued_tokens"] > 0) == (reuse == "graft" and is_whole)
        assert loop.reuse.books.num_requests == 0
