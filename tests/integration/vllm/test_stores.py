"""Stores behind a real vLLM: text outlives the engine, and whatever a store does to it, answers stay right."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from kv_listener import Listener
from vllm.config import KVEventsConfig

from engines import answer_of, engine, parameters, text
from kvgraft.integrations.vllm.worker import stores
from kvgraft.integrations.vllm.worker.space import row_layout, space_of, weights_of
from kvgraft.memory.store import register_store
from kvgraft.memory.store.tier.reader import ReadCounters
from kvgraft.memory.store.tier.writer import WriteCounters
from kvgraft.reuse.donor_events import DONOR_PARENT
from kvgraft.reuse.reads import ReadTerms
from kvgraft.reuse.stored import is_stored
from kvgraft.testing.memory_store import Faults, FaultyStore, MemoryStore
from kvgraft.testing.registries import isolated_registries

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
DONOR, PROMPT = HEAD + DOCUMENT + QUESTION, OTHER_HEAD + DOCUMENT + OTHER_QUESTION
PATIENCE_S = 300.0
OPTIONS = {"selection": "none", "correction": "none"}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine is not what is tested."""
    monkeypatch.setattr(ReadTerms, "patience_s", lambda *_: PATIENCE_S)


def follow(served):
    """Let the scheduler see what stores have."""
    served.ask(text(9, 20), "off", max_tokens=1)
    assert served.scheduler.registry.stores.look(PATIENCE_S)
    served.ask(text(9, 20), "off", max_tokens=1)


def flush(served):
    served.ask(text(9, 20), "off", max_tokens=1)
    for writer in served.worker._stores._writers:
        assert writer.flush(PATIENCE_S)
    follow(served)


def demote(served):
    """As under pressure: what is stored leaves host memory."""
    flush(served)
    served.scheduler.registry._leave_host(1 << 40, only_stored=True)
    assert all(is_stored(donor) for donor in served.scheduler.registry.catalogue)
    served.ask(text(9, 20), "off", max_tokens=1)
    assert served.worker._donors.used_bytes == 0
    served.llm.reset_prefix_cache()


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_all(core):
    """Steps until nothing runs; outputs in the order in which they ended."""
    ended = []
    while core.has_unfinished_requests():
        ended += [output for output in core.step() if output.finished]
    return ended


def tokens_of(served):
    return {tuple(donor.token_ids.tolist()) for donor in served.scheduler.registry.catalogue}


def errors(served):
    return served.scheduler.counts.num_errors


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def stored(request, model_folder, tmp_path_factory):
    """A family, and the store that an engine of it has left."""
    url = f"file:{tmp_path_factory.mktemp('store')}"
    with engine(model_folder, request.param, options={**OPTIONS, "store": url}) as before:
        before.donate(DONOR)
        flush(before)
        assert tuple(DONOR) in tokens_of(before)
        before.check()
    return request.param, url


def test_text_of_before_a_restart_is_grafted(stored, model_folder):
    """And routers hear of donors that come and go."""
    family, url = stored
    listener = Listener()
    options = {**OPTIONS, "store": url, "announce_donors": True}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{listener.port}")
    settings = {"num_gpu_blocks_override": 700, "kv_events_config": events}
    with listener, engine(model_folder, family, options=options, **settings) as one:
        while not listener.events:  # until it is connected, nobody hears what is told
            one.ask(text(99, 64), "off", max_tokens=1)
            one.llm.reset_prefix_cache()
        follow(one)
        assert tokens_of(one) == {tuple(DONOR)}
        answer = one.ask(PROMPT)
        assert answer.shifted == len(DOCUMENT)
        assert {span["tier"] for span in answer.report["spans"]} == {"file"}
        assert answer.report["timings_ms"]["read"] > 0
        for _ in range(2000):
            if one.worker._donors.later(donor_of(one, DONOR)) is not None:
                break
            one.ask(text(9, 20), "off", max_tokens=1)
        for donor in list(one.scheduler.registry.catalogue):
            if donor.num_tokens != len(DONOR):
                one.scheduler.registry.stores.donors.unbind(donor.donor_id)
                one.scheduler.registry.forget(donor.donor_id)
        one.llm.reset_prefix_cache()
        again = one.ask(PROMPT)  # from host memory
        assert again.shifted == len(DOCUMENT)
        assert (answer.tokens, answer.logprobs) == (again.tokens, again.logprobs)
        stored_head = donor_events(one, listener, "BlockStored", lambda event: event["token_ids"] == OTHER_HEAD)
        assert stored_head["parent_block_hash"] == DONOR_PARENT
        donor_events(one, listener, "BlockRemoved", lambda event: event["block_hashes"] == stored_head["block_hashes"])
        one.check()


def donor_events(served, listener, kind, is_it):
    """The event of a donor that is heard, sooner or later."""
    while True:
        told = [event for event in listener.events if event.get("ownership") == "kvgraft" and event["type"] == kind]
        if found := [event for event in told if is_it(event)]:
            return found[0]
        served.ask(text(9, 20), "off", max_tokens=1)


def donor_of(served, tokens):
    (donor,) = (d for d in served.scheduler.registry.catalogue if d.token_ids.tolist() == list(tokens))
    return donor.donor_id


def test_a_damaged_file_is_a_counted_miss_and_goes(stored, model_folder, tmp_path):
    family, url = stored
    (space,) = [path for path in _folder(url).iterdir() if path.is_dir() and any(path.glob("*.safetensors"))]
    for path in space.glob("*.safetensors"):
        if path.stat().st_size > 1 << 20:
            raw = bytearray(path.read_bytes())
            raw[-(len(raw) // 3)] ^= 4
            path.write_bytes(raw)
    with engine(model_folder, family, options={**OPTIONS, "store": url}, num_gpu_blocks_override=700) as one:
        follow(one)
        before = set(space.glob("*.safetensors"))
        cold = one.cold(PROMPT)
        answer = one.ask(PROMPT)
        assert answer.shifted == 0
        assert answer.report["miss"]["reason"] == "store"
        answer.assert_like(cold)
        assert errors(one) == 0
        assert before - set(space.glob("*.safetensors"))
        one.check()


def _folder(url):
    from pathlib import Path

    return Path(url.removeprefix("file:"))


@pytest.fixture(scope="module")
def shared():
    return FaultyStore(MemoryStore(), Faults())


@pytest.fixture(scope="module")
def served(model_folder, shared):
    with isolated_registries():
        register_store("toy", lambda where, options: shared)
        options = {**OPTIONS, "store": "toy:", "max_recompute_tokens_per_step": 64}
        with engine(model_folder, "llama", options=options, num_gpu_blocks_override=700) as one:
            yield one


@pytest.fixture(autouse=True)
def as_it_was(request):
    yield
    if "served" not in request.fixturenames:
        return
    served, shared = (request.getfixturevalue(name) for name in ("served", "shared"))
    shared.faults.released.set()
    shared.faults.__init__()
    served.forget_donors()
    flush(served)
    shared.store.objects.clear()
    follow(served)
    served.forget_donors()
    served.scheduler.counts.__init__()
    for reader in served.worker._stores._readers:
        reader._rest_s, reader._rests_until = 0.0, float("-inf")
        reader.speed.__init__()
    served.scheduler.registry.stores.speed.__init__()
    follow(served)
    served.check()


def test_what_is_demoted_is_read_again(served, shared, monkeypatch):
    """And the store hears that it was of use."""
    served.donate(DONOR)
    near = served.ask(PROMPT)
    flush(served)
    for donor in list(served.scheduler.registry.catalogue):
        if donor.num_tokens != len(DONOR):
            key = served.scheduler.registry.stores.donors.key_of(donor.donor_id)
            shared.remove(served.worker._stores.space, key)
            served.scheduler.registry.forget(donor.donor_id)
    demote(served)
    touched, key = [], served.scheduler.registry.stores.donors.key_of(donor_of(served, DONOR))
    monkeypatch.setattr(shared.store, "touch", lambda space, keys: touched.append((space, keys)))
    far = served.ask(PROMPT)
    assert far.shifted == near.shifted == len(DOCUMENT)
    wait_for(lambda: touched)
    assert touched == [(served.worker._stores.space, [key])]
    assert (far.tokens, far.logprobs) == (near.tokens, near.logprobs)


@pytest.mark.parametrize("fault", ["fail", "lose", "truncate", "corrupt"])
def test_a_store_that_fails_costs_nothing_but_time(served, shared, fault):
    served.donate(DONOR)
    cold = served.cold(PROMPT)
    demote(served)
    getattr(shared.faults, fault).add("read")
    answer = served.ask(PROMPT)
    assert answer.shifted == 0
    assert answer.report["miss"]["reason"] == "store"
    assert shared.faults.happened
    answer.assert_like(cold)
    served.llm.reset_prefix_cache()
    assert served.ask(text(8, 77) + DOCUMENT, "graft").shifted > 0, "what was computed is a donor"


def test_others_run_while_a_read_hangs(served, shared, monkeypatch):
    served.donate(DONOR)
    cold = served.cold(PROMPT)
    demote(served)
    monkeypatch.setattr(ReadTerms, "patience_s", lambda *_: 3.0)
    shared.faults.hang.add("read")
    core = served.llm.llm_engine
    core.add_request("reads", {"prompt_token_ids": PROMPT}, parameters(None, 6))
    core.add_request("other", {"prompt_token_ids": text(12, 90)}, parameters("off", 30))
    ended = run_all(core)
    assert [output.request_id for output in ended] == ["other", "reads"]
    answer = answer_of(ended[1])
    assert "has not given 1 spans" in answer.report["miss"]["detail"]
    assert sum(served.worker._stores._num_late) == 1
    assert answer.report["miss"]["reason"] == "store"
    answer.assert_like(cold)


def test_a_store_that_hung_is_read_again(served, shared, monkeypatch):
    """Reads that hang make reads look slow; while nothing is read, only time corrects that."""
    documents = [text(100 + number, 400) for number in range(18)]
    for document in documents:
        served.donate(HEAD + document)
    demote(served)
    with monkeypatch.context() as patch:
        patch.setattr(ReadTerms, "patience_s", lambda *_: 0.3)
        shared.faults.hang.add("read")
        for document in documents[:2]:
            assert served.ask(OTHER_HEAD + document + QUESTION).shifted == 0
        shared.faults.hang.clear()
        shared.faults.released.set()
    for document in documents[2:]:
        if served.ask(OTHER_HEAD + document + QUESTION).shifted:
            return
        time.sleep(2.0)
    raise AssertionError("no read in half a minute")


def test_a_request_that_ends_while_it_waits_leaves_nothing(served, shared):
    served.donate(DONOR)
    demote(served)
    shared.faults.hang.add("read")
    core = served.llm.llm_engine
    core.add_request("reads", {"prompt_token_ids": PROMPT}, parameters(None, 6))
    while not served.worker._jobs:
        assert not [output for output in core.step() if output.finished]
    core.abort_request(["reads"])
    core.add_request("other", {"prompt_token_ids": text(12, 90)}, parameters("off", 3))
    run_all(core)
    assert not served.worker._jobs
    served.check()


def test_spans_that_have_arrived_are_computed_while_others_are_on_their_way(served, shared):
    """Two donors; the second hangs. What stands in front of it is grafted and computed meanwhile."""
    second = text(6, 300)
    served.donate(HEAD + DOCUMENT, text(15, 40) + second)
    expected = served.cold(prompt := OTHER_HEAD + DOCUMENT + text(16, 60) + second + OTHER_QUESTION)
    demote(served)
    keys = {len(donor.token_ids): donor.kv.key for donor in served.scheduler.registry.catalogue}
    read = shared.store.read

    def slow(space, key, offset, into):
        if key == keys[340]:
            shared.faults.released.wait(PATIENCE_S)
        read(space, key, offset, into)

    shared.store.read = slow
    try:
        core = served.llm.llm_engine
        core.add_request("reads", {"prompt_token_ids": prompt}, parameters(None, 6))
        job, gap, computed = None, set(range(130 + 700, 130 + 760)), set()
        while job is None or not (gap <= computed and job.is_blocked):
            assert not [output for output in core.step() if output.finished]
            job = next(iter(served.worker._jobs.values()), None)
            if job is not None:
                current = job._pass
                computed = set(current._rows[: current._done].tolist())
        assert not job._prompt.spans.is_complete
        shared.faults.released.set()
        outputs = run_all(core)
    finally:
        del shared.store.read
    answer = answer_of(outputs[-1])
    assert answer.shifted == 1000
    near = served.cold(prompt)
    near.assert_like(expected)


def test_other_weights_have_other_text(served, shared):
    served.donate(DONOR)
    flush(served)
    space = served.worker._stores.space
    model = served.worker._handle.model
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(1.1)
        cold = served.cold(PROMPT)
        answer = served.ask(PROMPT)  # with it workers notice
        assert answer.shifted == 0
        answer.assert_like(cold)
        assert served.worker._stores.space not in ("", space)
        follow(served)
        assert tuple(DONOR) not in tokens_of(served)
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.data.copy_(kept[name])
    served.llm.reset_prefix_cache()
    served.ask(text(11, 60), "exact")
    follow(served)
    assert served.worker._stores.space == space
    assert tuple(DONOR) in tokens_of(served), "the same weights as before, proved by every element"
    served.llm.reset_prefix_cache()
    assert served.ask(PROMPT).shifted == len(DOCUMENT)


def test_every_rank_of_every_degree_has_a_space_of_its_own(served):
    rank = served.worker._rank
    layout, mine = row_layout(rank), weights_of(rank)
    names = [space_of(rank, layout, [mine] * ranks, number) for number, ranks in ((0, 1), (0, 2), (1, 2))]
    assert len(set(names)) == 3
    assert names[0] == served.worker._stores.space


def test_a_space_is_of_the_weights_of_all_ranks(served, monkeypatch):
    """Rank 0 is the same in both checkpoints, its K/V are not."""
    rank, spaces = served.worker._rank, []
    for other in ("00", "01"):
        monkeypatch.setattr(stores, "gathered", lambda mine, other=other: [mine, other])
        served.worker._stores.prove(rank)
        spaces.append(served.worker._stores.space)
    monkeypatch.undo()
    served.worker._stores.prove(rank)
    assert len({*spaces, served.worker._stores.space}) == 3


def test_a_tenant_never_reads_what_another_has_stored(served):
    served.ask(DONOR, "exact", max_tokens=1, cache_salt="one")
    served.llm.reset_prefix_cache()
    demote(served)
    assert served.ask(PROMPT, cache_salt="two").shifted == 0
    served.llm.reset_prefix_cache()
    demote(served)
    assert served.ask(PROMPT, cache_salt="one").shifted == len(DOCUMENT)


def test_a_store_that_rests_is_told_of_until_it_does_not():
    """Across a change of space, whose reader is another one."""

    class Reader(SimpleNamespace):
        close = expected_s = lambda *_: 0.0

    stores_of_rank = stores.RankStores([MemoryStore(), MemoryStore()], max_queued_bytes=1)

    def told(*rests):
        stores_of_rank._readers = [Reader(is_failing=each, counters=ReadCounters()) for each in rests]
        stores_of_rank._writers = [Reader(counters=WriteCounters()) for _ in rests]
        stores_of_rank._num_late = [0] * len(rests)
        return stores_of_rank.take_counts()

    assert told(True, False) == {"store_resting/memory": 1}
    assert told(True, True) == {"store_resting/memory": 1}
    stores_of_rank._readers, stores_of_rank._writers = [], []
    stores_of_rank.forget_space()
    assert stores_of_rank.take_counts() == {}
    assert told(False, False) == {"store_resting/memory": -2}
    assert told(False, False) == {}
