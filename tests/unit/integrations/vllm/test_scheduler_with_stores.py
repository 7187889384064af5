"""The scheduler's half with a store behind it, and calls of vLLM 0.33 that come late or never."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from stand_ins import BLOCK, Engine, Request, Shelf, ShelfFeed
from test_graft_scheduler import DOCUMENTS, make_graft

from kvgraft.integrations.vllm.messages import ReadCost, StoreReport, WorkerReport
from kvgraft.integrations.vllm.scheduler.stores import PrefillSteps
from kvgraft.memory.store.tier import Touches
from kvgraft.reuse.stored import is_stored
from kvgraft.testing.memory_store import Faults, FaultyStore, MemoryStore

HOST = 400
DONOR, PROMPT = [9001] * 40 + DOCUMENTS[0] + [9002] * 9, [8001] * 10 + DOCUMENTS[0] + [8002] * 7
NOTHING = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={},
    scheduled_spec_decode_tokens={},
    preempted_req_ids=set(),
)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    monkeypatch.setattr("kvgraft.integrations.vllm.scheduler.stores.StoreFeed", ShelfFeed)


@pytest.fixture
def shelf():
    return Shelf()


def make_engine(shelf=None, load="auto", host_tokens=HOST):
    engine = Engine(make_graft(load, shelf, host_tokens if shelf is not None else None), shelf)
    engine.step(room=True, chunk=400)  # workers tell their space
    return engine


def serve(engine, name, tokens, mode="graft", answer=1):
    request = Request(name, list(tokens), {"kvgraft": mode}, answer)
    engine.add(request)
    for _ in range(20):
        engine.step(room=True, chunk=400)
        engine.graft.check()
        if request not in (*engine.running, *engine.waiting):
            break
    engine.step(room=True, chunk=400)  # what it left is told to workers, and stores are followed
    return request


def tiers(engine):
    return sorted("cold" if is_stored(donor) else "host" for donor in engine.graft.registry.catalogue)


def test_text_of_before_a_restart_is_grafted_and_comes_nearer(shelf):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = make_engine(shelf)
    engine.step(room=True, chunk=400)
    assert tiers(engine) == ["cold"]
    request = Request("asked", list(PROMPT), None, 1)
    engine.add(request)
    promised = engine.graft.match(request, 0)
    assert promised == (80, True), "what is read is waited for by its request alone"
    served = serve(engine, "again", PROMPT)
    assert served.worst_copied == 70
    assert "host" in tiers(engine)
    assert engine.workers.donors


@pytest.mark.parametrize("streams", [0, 1])
def test_reads_that_arrive_together_are_repaired_one_step_after_another(shelf, streams):
    """Repairs come with second tokens, which no step can put off: what can is that a request goes on."""
    serve(make_engine(shelf), "donor", DONOR, "exact")
    limit, number = 300, 12
    graft = make_graft("auto", shelf, HOST, selection="first_k", max_recompute_tokens_per_step=limit)
    engine = Engine(graft, shelf)
    engine.step(room=True, chunk=400)
    engine.step(room=True, chunk=400)
    rows, commands = [], graft.commands

    def noted(output):
        made = commands(output)
        claims = [graft._attempts.running[repair.request_id].claim for repair in made.repairs]
        assert all(claim.num_stored_tokens for claim in claims)
        rows.append(sum(claim.num_repair_rows for claim in claims))
        return made

    graft.commands = noted
    for stream in range(streams):
        engine.add(Request(f"stream {stream}", [4000 + stream] * 40, {"kvgraft": "exact"}, 60))
    engine.fate = "slow"
    for name in range(number):
        engine.add(Request(str(name), [8001 + name] * (10 + name) + DOCUMENTS[0] + [8100 + name] * 40, None, 4))
        engine.step(room=True, chunk=400)
    assert len(engine.workers.jobs) == number
    engine.fate = ""
    for _ in range(60):
        engine.step(room=True, chunk=400)
        graft.check()
    assert not engine.running, "all have been answered"
    assert not graft._rows.holds_any
    assert max(rows) <= limit < sum(rows)
    assert sum(count > 0 for count in rows) <= 8, "nobody waits longer than that takes"


def test_a_request_that_ends_while_it_may_not_go_on_holds_nobody_up(shelf):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    graft = make_graft("auto", shelf, HOST, selection="first_k", max_recompute_tokens_per_step=130)
    engine = Engine(graft, shelf)
    engine.step(room=True, chunk=400)
    engine.step(room=True, chunk=400)
    engine.fate = "slow"
    for name in range(4):
        engine.add(Request(str(name), [8001 + name] * (10 + name) + DOCUMENTS[0] + [8100 + name] * 40, None, 4))
        engine.step(room=True, chunk=400)
    engine.fate = ""
    engine.step(room=True, chunk=400)
    assert graft._rows.holds_any
    waiting = [request for request in engine.running if request.waits]
    engine.end(waiting[0])
    for _ in range(20):
        engine.step(room=True, chunk=400)
        graft.check()
    assert not engine.running
    assert not graft._rows.holds_any


def test_what_is_stored_leaves_host_memory_without_leaving_the_catalogue(shelf):
    engine = make_engine(shelf, host_tokens=200)
    serve(engine, "first", DONOR, "exact")
    assert tiers(engine) == ["host"]
    serve(engine, "second", [7001] * 30 + DOCUMENTS[1] + [7002] * 30, "exact")
    assert tiers(engine) == ["cold", "host"]
    assert sum(map(len, engine.workers.donors.values())) <= 200
    assert serve(engine, "asked", PROMPT).worst_copied == 70


def test_without_a_store_what_leaves_host_memory_is_gone():
    engine = Engine(make_graft("auto", None, 200))
    serve(engine, "first", DONOR, "exact")
    serve(engine, "second", [7001] * 30 + DOCUMENTS[1] + [7002] * 30, "exact")
    assert tiers(engine) == ["host"]


def test_an_object_that_is_lost_between_plan_and_read_is_a_counted_miss(shelf):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = make_engine(shelf)
    engine.step(room=True, chunk=400)
    (space,) = shelf.spaces.values()
    request = Request("asked", list(PROMPT), None, 1)
    engine.add(request)
    assert engine.graft.match(request, 0)[0]
    space.clear()
    engine.step(room=True, chunk=400)
    for _ in range(5):
        engine.step(room=True, chunk=400)
    assert request not in (*engine.running, *engine.waiting)
    assert request.worst_copied == 0
    assert "cold" not in tiers(engine)
    assert not engine.graft.registry._promoting


def test_text_of_other_weights_is_not_there(shelf):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = Engine(make_graft("auto", shelf, HOST), shelf)
    engine.epoch = engine.workers.epoch = 1
    engine.step(room=True, chunk=400)
    engine.step(room=True, chunk=400)
    assert tiers(engine) == []


def test_behind_a_reset_stored_text_counts_once_weights_are_proved_again(shelf):
    engine = make_engine(shelf)
    serve(engine, "donor", DONOR, "exact")
    engine.graft.reset(prefixes_are_gone=True)
    assert tiers(engine) == []
    assert engine.graft.registry.stores.spaces == ()
    engine.step(room=True, chunk=400)
    engine.step(room=True, chunk=400)
    assert tiers(engine) == ["cold"], "the same weights"
    engine.epoch += 1
    engine.graft.reset(prefixes_are_gone=True)
    engine.step(room=True, chunk=400)
    engine.step(room=True, chunk=400)
    assert tiers(engine) == [], "others"


def test_text_that_is_computed_before_weights_are_proved_is_stored_once(shelf):
    engine = Engine(make_graft("auto", shelf, HOST), shelf)
    spaces = engine.graft.registry.stores._spaces
    serve(engine, "donor", DONOR, "exact")
    assert spaces
    for _ in range(3):
        engine.step(room=True, chunk=400)
    assert tiers(engine) == ["host"]
    (donor,) = engine.graft.registry.catalogue
    assert engine.graft.registry.stores.donors.key_of(donor.donor_id)


def test_every_rank_must_have_proved_its_weights(shelf):
    graft = make_graft("auto", shelf, HOST)
    stores = graft.registry.stores
    stores._num_ranks = 2
    opened = []
    stores_open = stores._open

    def opening():
        opened.append(dict(stores._spaces))
        if len(stores._spaces) == 2:
            stores._spaces = {0: "aa"}  # a stand-in's feed knows one space
            stores._num_ranks = 1
        stores_open()

    stores._open = opening
    first = WorkerReport(store=StoreReport({1: "bb"}))
    graft.receive(first)
    assert stores.spaces == ()
    graft.receive(first.joined(WorkerReport(store=StoreReport({0: "aa"}))))
    assert opened == [{1: "bb"}, {0: "aa", 1: "bb"}]


@pytest.mark.parametrize(("read_s_per_token", "is_grafted"), [(1e-5, True), (1.0, False), (float("inf"), False)])
def test_a_read_is_weighed_against_what_the_engine_computes_meanwhile(shelf, read_s_per_token, is_grafted):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = make_engine(shelf)
    engine.step(room=True, chunk=400)
    times = iter(range(100))
    engine.graft.registry.stores.speed = speed = PrefillSteps(lambda: next(times))
    speed.step_begins(1000, is_prefill_alone=True)
    speed.step_ends()
    assert speed.per_s == 1000
    engine.graft.receive(WorkerReport(store=StoreReport(cost=ReadCost(1e-3, read_s_per_token))))
    request = Request("asked", list(PROMPT), None, 1)
    assert bool(engine.graft.match(request, 0)[0]) == is_grafted
    if not is_grafted:  # what is computed anyhow comes nearer by
        assert engine.graft._attempts.running["asked"].held.prompt is not None
    engine.graft.finish(request)
    engine.graft.check()


@pytest.mark.parametrize(
    ("read_s_per_token", "tokens_per_s", "expected_s"),
    [
        (1e-5, None, 0.5),
        (0.02, None, 4 * 70 * 0.02),
        (0.02, 20.0, 70 / 20),
        (float("inf"), None, 0.5),
        (float("inf"), 20.0, 70 / 20 / 4),
        (1e6, None, 30.0),
        (1e6, 0.01, 30.0),
    ],
)
def test_no_read_may_take_for_ever(shelf, read_s_per_token, tokens_per_s, expected_s):
    """What was planned while a store answered may be admitted when it does not any more."""
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = make_engine(shelf)
    engine.step(room=True, chunk=400)
    request, num_tokens = waiting(engine)
    engine.graft.registry.stores.speed = SimpleNamespace(
        per_s=tokens_per_s, step_begins=lambda *args, **kwargs: None, step_ends=lambda: None
    )
    engine.graft.receive(WorkerReport(store=StoreReport(cost=ReadCost(0.0, read_s_per_token))))
    engine.graft.admit(request, blocks(), num_tokens)
    (graft,) = engine.graft.commands(NOTHING).grafts
    assert graft.deadline_s == pytest.approx(expected_s)


def waiting(engine, tokens=PROMPT):
    request = Request("asked", list(tokens), None, 1)
    engine.requests["asked"] = request
    num_tokens, waits = engine.graft.match(request, 0)
    assert waits
    assert num_tokens
    return request, num_tokens


def blocks():
    return (list(range(1, 10)),)


@pytest.fixture
def served():
    engine = Engine(make_graft("async"))
    serve(engine, "donor", DONOR, "exact")
    return engine


def test_an_admission_may_come_steps_later(served):
    request, num_tokens = waiting(served)
    for _ in range(3):
        assert served.graft.commands(NOTHING).grafts == ()
    served.graft.admit(request, blocks(), num_tokens)
    (graft,) = served.graft.commands(NOTHING).grafts
    assert not graft.void
    served.graft.check()


def test_an_admission_that_never_comes_leaves_nothing_behind(served):
    request, num_tokens = waiting(served)
    assert served.graft.commands(NOTHING).grafts == ()
    served.graft.finish(request)
    served.graft.admit(request, blocks(), num_tokens)  # too late
    commands = served.graft.commands(NOTHING)
    assert (commands.grafts, commands.cancels) == ((), ())
    assert served.graft.num_states == 0
    served.graft.check()


@pytest.mark.parametrize("how", ["reset", "in place"])
def test_a_graft_of_forgotten_donors_fails_when_its_admission_comes(served, how):
    request, num_tokens = waiting(served)
    if how == "reset":
        served.graft.reset(prefixes_are_gone=True)
    else:
        served.graft.receive(WorkerReport(num_weight_changes=1))
    served.graft.check()
    served.graft.admit(request, blocks(), num_tokens)
    (graft,) = served.graft.commands(NOTHING).grafts
    assert "forgotten" in graft.void
    assert graft.block_ids[0] == tuple(blocks()[0][: -(-graft.end // BLOCK)])
    served.workers.fail(graft)
    served.graft.receive(served.workers.report())
    told = served.graft.finish(request)["kvgraft"]
    assert (told["shifted_tokens"], told["miss"]["reason"]) == (0, "no_donors")
    assert served.graft.counts.num_errors == 0, "what was to be grafted is forgotten, which is no error"
    assert served.graft.num_states == 0


def test_ranks_tell_of_the_latest_change_of_weights():
    joined = WorkerReport(num_weight_changes=1).joined(WorkerReport(num_weight_changes=3))
    assert joined.num_weight_changes == 3


@pytest.mark.parametrize("fate", ["lost", "merged"])
def test_texts_are_kept_again_behind_a_report_that_did_not_arrive(fate):
    """Workers know of two changes of the weights; the scheduler hears of the first never, or with the second at once."""
    engine = make_engine()
    told = []
    receive = engine.graft.receive

    def lossy(report):
        if report.num_weight_changes == 1:
            told.append(report)
        else:
            receive(told[0].joined(report) if fate == "merged" and told else report)

    engine.graft.receive = lossy
    engine.epoch += 1
    serve(engine, "one", DONOR, "exact")
    assert told
    assert not engine.workers.donors
    engine.epoch += 1
    serve(engine, "two", DOCUMENTS[1] + [7], "exact")
    engine.cache.clear()
    engine.graft.reset(prefixes_are_gone=True)
    serve(engine, "three", DONOR, "exact")
    assert engine.workers.donors, "captures are trusted again"
    assert serve(engine, "asked", PROMPT).worst_copied == 70


def test_a_graft_that_vllm_cuts_fails(served):
    request, num_tokens = waiting(served)
    served.graft.admit(request, blocks(), num_tokens - BLOCK)
    (graft,) = served.graft.commands(NOTHING).grafts
    assert "cut" in graft.void
    served.graft.check()


def test_a_request_that_ends_behind_a_late_admission_is_cancelled(served):
    request, num_tokens = waiting(served)
    served.graft.admit(request, blocks(), num_tokens)
    served.graft.commands(NOTHING)
    served.graft.finish(request)
    assert served.graft.commands(NOTHING).cancels == ("asked",)
    served.graft.check()


def test_where_tokens_come_from_is_told(shelf):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = make_engine(shelf)
    engine.step(room=True, chunk=400)
    request = Request("asked", list(PROMPT), None, 1)
    engine.requests["asked"] = request
    num_tokens, _ = engine.graft.match(request, 0)
    engine.graft.admit(request, blocks(), num_tokens)
    assert engine.graft.sources("asked", num_tokens) == {"host": 0, "external_unspecified": 80}
    shelf.name = "file"
    assert engine.graft.sources("asked", num_tokens) == {"host": 0, "external_unspecified": 10, "disk": 70}
    assert engine.graft.sources("nobody", 7) == {"external_unspecified": 7}


@pytest.mark.parametrize("tier", ["cold", "host"])
def test_a_store_is_told_what_is_of_use_wherever_it_was_read_from(shelf, tier):
    engine = make_engine(shelf)
    serve(engine, "donor", DONOR, "exact")
    (donor,) = engine.graft.registry.catalogue
    key = engine.graft.registry.stores.donors.key_of(donor.donor_id)
    assert not shelf.touched
    if tier == "cold":
        engine.graft.registry._leave_host(1000, only_stored=True)
    assert tiers(engine) == [tier]
    assert serve(engine, "asked", PROMPT).worst_copied == 70
    wait_for(lambda: shelf.touched)
    assert shelf.touched == [("00", key)]


def test_a_store_that_is_slow_to_hear_is_told_everything_once():
    gate = threading.Event()
    store = FaultyStore(MemoryStore(), Faults(hang={"touch"}, fail={"touch"}, released=gate))
    told = []
    store.touch = lambda space, keys: (told.append((space, sorted(keys))), FaultyStore.touch(store, space, keys))
    touches = Touches(store)
    touches.report(["aa"], ["01"])
    wait_for(lambda: told)
    for _ in range(3):
        touches.report(["aa", "bb"], ["02", "03"])
    gate.set()
    wait_for(lambda: len(told) == 3)
    assert sorted(told) == [("aa", ["01"]), ("aa", ["02", "03"]), ("bb", ["02", "03"])]
    touches.close()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("has_room", [True, False])
def test_what_had_no_room_comes_back_once_there_is_some(shelf, has_room):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = make_engine(shelf)
    registry = engine.graft.registry
    engine.step(room=True, chunk=400)
    (donor,) = registry.catalogue
    for evicted in registry.catalogue.evict(donor.num_tokens):
        registry._gone(evicted)
    assert tiers(engine) == []
    if not has_room:
        registry.catalogue._capacity = donor.num_tokens - 1
    for _ in range(2):
        engine.step(room=True, chunk=400)
    assert tiers(engine) == (["cold"] if has_room else [])


def test_a_donor_that_was_replaced_does_not_come_back_from_the_store(shelf):
    engine = make_engine(shelf, host_tokens=1_000)
    serve(engine, "donor", DONOR, "exact")
    novel = list(range(20_000, 20_064))
    assert serve(engine, "grafted", PROMPT + novel).worst_copied == 70
    catalogue = engine.graft.registry.catalogue

    def generations():
        return sorted(donor.generation for donor in catalogue if novel[0] in donor.token_ids)

    assert generations() == [1]
    serve(engine, "replayed", [8002] * 7 + novel, "exact")
    assert engine.graft.registry.num_replaced == 1
    wait_for(lambda: engine.graft.registry.stores.donors.recall(is_urgent=True) == [])
    for _ in range(5):
        engine.step(room=True, chunk=400)
    assert generations() == [0]
    engine.graft.check()


def test_what_finds_no_room_at_first_comes_later(shelf):
    serve(make_engine(shelf), "donor", DONOR, "exact")
    engine = Engine(make_graft("auto", shelf, HOST), shelf)
    catalogue = engine.graft.registry.catalogue
    capacity, catalogue._capacity = catalogue._capacity, len(DONOR) - 1
    for _ in range(3):
        engine.step(room=True, chunk=400)
    assert tiers(engine) == []
    catalogue._capacity = capacity
    for _ in range(2):
        engine.step(room=True, chunk=400)
    assert tiers(engine) == ["cold"]
