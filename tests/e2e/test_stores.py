"""Stores behind the embedded engine: what they give back changes no answer, and what they fail to give is computed."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch

from kvgraft.engine import LLM, SamplingParams, store_space
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.risk import Served
from kvgraft.errors import ConfigError
from kvgraft.fidelity import cache_of
from kvgraft.memory.store import register_store
from kvgraft.memory.store.record import DonorRecord, StoreNews, decode_head
from kvgraft.memory.store.tier import speed, used
from kvgraft.reuse import reads as reads_module
from kvgraft.reuse.stored import StoredKV
from kvgraft.testing.memory_store import Faults, FaultyStore, MemoryStore
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import Fidelity, Match, MissReason, Namespace, RepairTime

FOUR = SamplingParams(4, ignore_eos=True)
WAIT_S = 60.0
SLOW_FLOPS = 1.0
"""An engine so slow that every read beats computing: plans do not depend on the machine then."""


class Stores:
    """Stores that engines of a test share under `NAME:`; each opening has faults of its own."""

    def __init__(self):
        self.inner = {}
        self.opened = []

    def register(self, name):
        self.inner[name] = MemoryStore()
        self.inner[name].name = name

        def factory(where, options):
            store = FaultyStore(self.inner[name], Faults())
            self.opened.append(store)
            return store

        register_store(name, factory)

    @property
    def faults(self):
        """Of the store that was opened last."""
        return self.opened[-1].faults

    def keys(self, name):
        return [(space, key) for space, key in self.inner[name].objects]

    def records(self, name):
        return [decode_head(head, space, key).record for (space, key), (head, _) in self.inner[name].objects.items()]


@pytest.fixture
def stores():
    stores = Stores()
    stores.register("one")
    stores.register("two")
    yield stores
    for store in stores.opened:
        store.faults.released.set()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(reads_module, "_LEAST_PATIENCE_S", WAIT_S)


@pytest.fixture
def engines():
    """Make engines that are closed behind the test."""
    made = []

    def make(family="llama", *, slow=True, store="one:", **settings):
        torch.manual_seed(0)
        llm = LLM(adopt_model(family, tiny_model(family), None), **{"num_slots": 4000, "store": store} | settings)
        if slow and llm.engine.stores is not None:
            llm.engine.stores.flops_per_s = lambda: SLOW_FLOPS
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


def text(rng, length):
    return rng.integers(3, VOCABULARY, length)


def ask(llm, *parts, **options):
    output = llm.generate(np.concatenate(parts), FOUR, **options)[0]
    llm.check()
    return output


def impatient_with_a_store_that_hangs(stores, engines, rng, monkeypatch, *, num_documents, first_rest_s):
    """Documents in a store from which no read comes back, and an engine that waits 0.05 s for one."""
    documents = [text(rng, 400) for _ in range(num_documents)]
    first = engines()
    for document in documents:
        ask(first, document)
    assert first.sync_stores(WAIT_S)
    monkeypatch.setattr(reads_module, "_LEAST_PATIENCE_S", 0.05)
    monkeypatch.setattr(reads_module, "_SHARE_AT_MOST_S", 0.05)
    monkeypatch.setattr(used, "_FIRST_REST_S", first_rest_s)
    second = engines()
    assert second.sync_stores(WAIT_S)
    stores.faults.hang.add("read")
    return documents, second


def tiers(output):
    return [(span.tier, span.length) for span in output.report.spans]


def wait_until(condition, llm):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        llm.engine.poll_stores()
        time.sleep(0.01)


class Finding:
    """A catalogue that finds what it is told to."""

    def __init__(self, catalogue, find):
        self._catalogue = catalogue
        self.find = find

    def __getattr__(self, name):
        return getattr(self._catalogue, name)


@torch.inference_mode()
def first_layer(prompt):
    """Keys and values of layer 0, (num_tokens, heads, dim), by transformers alone."""
    torch.manual_seed(0)
    ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
    cache = cache_of(tiny_model("llama")(input_ids=ids, use_cache=True))
    return cache.layers[0].keys[0].transpose(0, 1), cache.layers[0].values[0].transpose(0, 1)


def stored(llm, number=0):
    return llm.engine.stores.status()[number]


class TestRestart:
    @pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
    def test_answers_are_those_of_the_donor_in_memory(self, family, stores, engines, rng):
        """The same K/V at the same places: equal answers, whatever the tier."""
        question, other, document = text(rng, 30), text(rng, 50), text(rng, 600)
        first = engines(family)
        ask(first, question, document)
        warm = ask(first, other, document)
        assert first.sync_stores(WAIT_S)
        first.close()
        second = engines(family)
        assert second.sync_stores(WAIT_S)
        assert second.space.donors.num_stored == len(second.space.donors) > 0
        cold = ask(second, other, document)
        assert {tier for tier, _ in tiers(cold)} == {"one"}
        assert cold.token_ids == warm.token_ids
        assert cold.report.shifted_tokens == warm.report.shifted_tokens
        assert "read" in cold.report.timings_ms
        assert second.num_errors == 0

    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_a_conversation_is_exact_turn_by_turn(self, family, stores, engines, rng):
        """Each turn is an object of its own, and tells what stood in front of it."""
        first, prompt = engines(family), text(rng, 300)
        for _ in range(3):
            output = ask(first, prompt)
            prompt = np.concatenate([prompt, output.token_ids, text(rng, 150)])
        known = len(prompt) - 150 - len(output.token_ids)
        assert first.sync_stores(WAIT_S)
        assert sorted(record.start_position > 0 for record in stores.records("one")) == [False, True, True]
        first.close()
        second = engines(family)
        assert second.sync_stores(WAIT_S)
        cold = ask(second, prompt)
        assert {span.fidelity for span in cold.report.spans} == {Fidelity.EXACT}
        assert cold.report.exact_tokens >= known - 20
        assert cold.token_ids == ask(second, prompt, reuse="off").token_ids
        other = prompt.copy()
        other[7] += 1 if other[7] < VOCABULARY - 1 else -1
        assert ask(second, other).report.exact_tokens <= 7
        assert second.num_errors == 0

    def test_a_used_donor_is_promoted_to_the_host(self, stores, engines, rng):
        question, other, document = text(rng, 30), text(rng, 50), text(rng, 600)
        first = engines()
        ask(first, question, document)
        assert first.sync_stores(WAIT_S)
        second = engines()
        assert second.sync_stores(WAIT_S)
        cold = ask(second, other, document)
        wait_until(lambda: not second.space.donors.num_stored, second)
        again = ask(second, other[:20], document)
        assert [tier for tier, _ in tiers(again)] == ["host"]
        assert tiers(cold)[0][1] == tiers(again)[0][1]

    def test_a_used_object_leaves_the_store_last(self, stores, engines, rng):
        first = engines()
        documents = [text(rng, 300) for _ in range(2)]
        for document in documents:
            ask(first, document)
            assert first.sync_stores(WAIT_S)
        oldest = stores.keys("one")[0]
        second = engines()
        assert second.sync_stores(WAIT_S)
        ask(second, text(rng, 20), documents[0])
        wait_until(lambda: stores.keys("one")[-1] == oldest, second)

    def test_use_of_a_donor_in_memory_is_told_to_the_store(self, stores, engines, rng):
        llm = engines()
        documents = [text(rng, 300) for _ in range(2)]
        for document in documents:
            ask(llm, document)
            assert llm.sync_stores(WAIT_S)
        oldest = stores.keys("one")[0]
        assert tiers(ask(llm, text(rng, 20), documents[0])) == [("device", 299)]
        wait_until(lambda: stores.keys("one")[1] == oldest, llm)

    def test_many_donors_are_taken_in_a_few_at_a_time(self, stores, engines, rng):
        """However little time there is, so that a large store holds up no step for long."""
        first = engines()
        for _ in range(20):
            ask(first, text(rng, 100))
        assert first.sync_stores(WAIT_S)
        second = engines()
        tier = second.engine.stores
        assert tier.stores[0].feed.look(WAIT_S)
        counts = []
        while not counts or tier.is_behind:
            tier.step(0.0)
            counts.append(second.space.donors.num_stored)
        assert counts[:3] == [8, 16, 20]

    def test_a_conversation_is_written_once(self, stores, engines, rng):
        """Every turn adds its own tokens; records neither overlap nor leave out more than the shortest part."""
        first = engines()
        prompt = text(rng, 300)
        for _ in range(4):
            output = ask(first, prompt)
            prompt = np.concatenate([prompt, output.token_ids, text(rng, 150)])
        said = len(prompt) - 150 - 1  # the last token drawn has no K/V
        assert first.sync_stores(WAIT_S)
        records = sorted(stores.records("one"), key=lambda record: record.start_position)
        assert len(records) == 4
        ends = [record.start_position + record.num_tokens for record in records]
        assert [record.start_position for record in records] == [0, *ends[:-1]]
        assert said - 16 < ends[-1] <= said, "less than the shortest run is left out"
        second = engines()
        assert second.sync_stores(WAIT_S)
        report = ask(second, prompt).report
        assert report.exact_tokens >= said - 4 * 32
        assert (report.shifted_tokens, report.recomputed_tokens) == (0, 0), "each says what stood in front of it"

    def test_a_shared_beginning_is_written_once(self, stores, engines, rng):
        system = text(rng, 400)
        first = engines()
        for _ in range(3):
            ask(first, system, text(rng, 200))
        assert first.sync_stores(WAIT_S)
        starts = sorted(record.start_position for record in stores.records("one"))
        assert starts[0] == 0
        assert len(starts) == 3
        assert all(400 <= start < 405 for start in starts[1:])  # texts may happen to go on alike

    def test_generation_and_position_come_back(self, stores, engines, rng):
        """Text that was computed behind a graft is stored as such, and no request makes it exact again."""
        document, question = text(rng, 300), text(rng, 200)
        first = engines()
        ask(first, document)
        ask(first, text(rng, 20), document, question)
        assert first.sync_stores(WAIT_S)
        records = stores.records("one")
        assert {(record.generation, record.start_position) for record in records} >= {(0, 0), (1, 320)}
        second = engines()
        assert second.sync_stores(WAIT_S)
        report = ask(second, text(rng, 70), question).report
        assert [(span.generation, span.position_delta) for span in report.spans] == [(1, -250)]

    def test_end_of_the_engine_writes_what_waits(self, stores, engines, rng):
        first = engines()
        ask(first, text(rng, 300))
        first.close()
        assert len(stores.keys("one")) == 1

    def test_a_cancelled_request_leaves_what_it_has_published(self, stores, engines, rng):
        first = engines()
        stream = first.stream(text(rng, 300), FOUR)
        next(stream)
        stream.close()
        assert first.sync_stores(WAIT_S)
        assert [record.num_tokens for record in stores.records("one")] == [300]


class TestSharing:
    def test_an_engine_finds_what_another_has_read_meanwhile(self, stores, engines, rng):
        reader, other = engines(), engines()
        document = text(rng, 400)
        ask(reader, text(rng, 10), document)
        assert reader.sync_stores(WAIT_S)
        assert other.sync_stores(WAIT_S)
        assert tiers(ask(other, text(rng, 40), document)) == [("one", 399)]

    def test_another_tenant_never_hits(self, stores, engines, rng):
        document = text(rng, 400)
        first = engines()
        ask(first, document, cache_salt="a")
        assert first.sync_stores(WAIT_S)
        (record,) = stores.records("one")
        assert record.namespace_key == Namespace(first.loaded.fingerprint, tenant_salt="a").key
        second = engines()
        assert second.sync_stores(WAIT_S)
        assert not ask(second, text(rng, 20), document, cache_salt="b").report.reused_tokens
        assert not ask(second, text(rng, 30), document).report.reused_tokens
        assert ask(second, text(rng, 40), document, cache_salt="a").report.shifted_tokens

    def test_other_weights_never_hit(self, stores, engines, rng):
        document = text(rng, 400)
        first = engines()
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        torch.manual_seed(0)
        model = tiny_model("llama")
        with torch.no_grad():
            next(model.parameters())[3, 3] += 1e-3
        other = LLM(adopt_model("llama", model, None), num_slots=4000, store="one:")
        assert other.sync_stores(WAIT_S)
        assert not len(other.space.donors)
        other.close()

    def test_all_stores_are_written_and_the_first_that_has_it_is_read(self, stores, engines, rng):
        document = text(rng, 400)
        first = engines(store="one:,two:")
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        assert len(stores.keys("one")) == len(stores.keys("two")) == 1
        second = engines(store="two:,one:", host_bytes=0)
        assert second.sync_stores(WAIT_S)
        assert [tier for tier, _ in tiers(ask(second, text(rng, 20), document))] == ["two"]
        for space, key in stores.keys("two"):
            stores.inner["two"].remove(space, key)
        assert second.sync_stores(WAIT_S)
        assert [tier for tier, _ in tiers(ask(second, text(rng, 30), document))] == ["one"]


class TestPressure:
    def test_what_leaves_memory_stays_in_the_store(self, stores, engines, rng):
        """A pool and a host that hold one text each: the others are forgotten, and read again."""
        documents = [text(rng, 300) for _ in range(5)]
        llm = engines(num_slots=700, host_bytes=300_000)
        for document in documents:
            ask(llm, document)
            assert llm.sync_stores(WAIT_S)
        assert llm.space.donors.num_stored >= 2
        assert len(llm.space.donors) == 5
        for document in documents:
            report = ask(llm, text(rng, 20), document).report
            assert report.shifted_tokens > 200
        assert llm.num_errors == 0

    def test_a_write_that_waits_holds_up_no_request(self, stores, engines, rng):
        """The slots of donors that wait for a store that hangs are given to others; what was never tried did not fail."""
        llm = engines(num_slots=700, host_bytes=0)
        stores.faults.hang.add("heads")
        outputs = [ask(llm, text(rng, 300)) for _ in range(6)]
        assert all(len(output.token_ids) == 4 for output in outputs)
        assert not stores.keys("one")
        stores.faults.released.set()
        assert llm.sync_stores(WAIT_S)
        told = stored(llm).writes
        assert told["stored"] + told["dropped"] == 6
        assert told["dropped"] >= 3
        assert told["failed"] == 0
        for record in stores.records("one"):
            assert record.num_tokens >= 300
        llm.check()

    def test_what_is_stored_is_of_the_text_although_slots_were_given_to_others(self, stores, engines, rng):
        """Writes that were under way when their slots went: what arrived in the store is right or not there."""
        llm = engines(num_slots=700, host_bytes=0)
        stores.faults.chance = 0.5
        stores.faults.hang_s = 0.05
        stores.faults.hang.add("heads")
        prompts = [text(rng, 300) for _ in range(8)]
        for prompt in prompts:
            ask(llm, prompt)
        assert llm.sync_stores(WAIT_S)
        again = engines()
        assert again.sync_stores(WAIT_S)
        assert len(again.space.donors) == len(stores.keys("one"))
        for record in stores.records("one"):
            prompt = record.token_ids[:300].astype(np.int64)
            warm, full = again.generate(prompt, FOUR)[0], again.generate(prompt, FOUR, "off")[0]
            assert warm.report.reused_tokens
            assert warm.token_ids == full.token_ids, "K/V of the same text at the same place are exact"


class TestLittleRoom:
    def test_what_found_no_room_comes_once_there_is_some(self, stores, engines, rng):
        document = text(rng, 300)
        first = engines()
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        second = engines(donor_tokens=400)
        stores.faults.fail.add("put")  # its own text stays its own
        ask(second, text(rng, 300))
        assert second.sync_stores(WAIT_S) is not None
        (own,) = [donor for donor in second.space.donors if not isinstance(donor.kv, StoredKV)]
        assert len(second.space.donors) == 1, "there is no room for what the store has"
        second.space.remove_donor(own.donor_id)

        def has_come():
            second.sync_stores(1.0)
            return len(second.space.donors) == 1

        wait_until(has_come, second)
        assert ask(second, text(rng, 20), document).report.shifted_tokens
        second.check()


class TestParts:
    """A text in a store and the same text in memory may stand at different positions: their K/V are not the same."""

    def test_a_part_of_other_positions_is_not_taken_for_the_donors_own(self, stores, engines, rng):
        """The second turn of a chat is stored from where it stood; after a restart its text is computed at position 0."""
        first = engines()
        prompt = text(rng, 300)
        output = ask(first, prompt)
        ask(first, prompt, output.token_ids, text(rng, 150))
        assert first.sync_stores(WAIT_S)
        first.close()
        part = max(stores.records("one"), key=lambda record: record.start_position)
        assert part.start_position > 250
        second = engines(num_slots=500, host_bytes=0)
        assert second.sync_stores(WAIT_S)
        ask(second, part.token_ids, reuse="exact")
        ask(second, text(rng, 420), reuse="exact")  # takes the slots of the one before
        assert second.sync_stores(WAIT_S)
        cold = [donor for donor in second.space.donors if isinstance(donor.kv, StoredKV)]
        assert len(cold) == 2
        for donor in cold:
            own = DonorRecord.of(donor)
            assert donor.kv.key == own.key
        query = np.concatenate([text(rng, 20), part.token_ids])
        with second.probe(query, 1) as probe:
            assert probe.report.shifted_tokens
            for got, wanted in zip(probe.kv(0), first_layer(query), strict=True):
                assert (got - wanted).abs().max() < 2e-4

    def test_an_own_part_is_bound_and_demoted(self, stores, engines, rng):
        """Of the same positions it is the donor's own, however it came into the store."""
        document = text(rng, 300)
        first = engines()
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        second = engines(num_slots=500, host_bytes=0)
        assert second.sync_stores(WAIT_S)
        ask(second, document, reuse="exact")
        ask(second, text(rng, 420), reuse="exact")
        assert second.space.num_dropped == 0
        assert second.space.donors.num_stored == 1

    def test_a_write_that_waits_does_not_move_to_a_repetition_of_its_text(self, stores, engines, rng):
        document, between = text(rng, 200), text(rng, 150)
        llm, other = engines(), engines()
        faults = stores.opened[0].faults
        faults.hang |= {"heads", "keys"}
        ask(other, document[100:], between)
        assert other.sync_stores(WAIT_S)
        ask(llm, document, reuse="exact")  # its write waits
        llm.engine.stores._take_news(0, StoreNews(tuple(stores.records("one"))))
        (key,) = llm.engine.stores.writes._pending
        writes, find = llm.engine.stores.writes, llm.space.donors.find
        calls = []

        def repetition_alone(query):
            """As where a longer run of another donor hides the first of two."""
            matches = find(query)
            calls.append(matches)
            return [match for match in matches if match.target_start >= 200]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writes, "_catalogue", Finding(writes._catalogue, repetition_alone))
            ask(llm, document, between, document, reuse="exact")
        assert any(match.target_start < 200 for match in calls[0]), "the first of them is found otherwise"
        faults.released.set()
        faults.hang.clear()
        assert llm.sync_stores(WAIT_S)
        for (space, name), (head, body) in stores.inner["one"].objects.items():
            if name != key:
                continue
            record = decode_head(head, space, name).record
            rows = np.frombuffer(bytearray(body), np.uint8).reshape(record.num_tokens, -1)
            block = llm.engine.stores._layout.unpack(rows)
            for got, wanted in zip((block.keys[0], block.values[0]), first_layer(record.token_ids), strict=True):
                assert (got.reshape(wanted.shape) - wanted).abs().max() < 2e-4

    @pytest.mark.parametrize("host_bytes", [0, 10_000_000])
    def test_an_object_that_is_lost_while_it_is_written_holds_up_nobody(self, host_bytes, stores, engines, rng):
        """Another engine has written the same donor, and the store has lost it again; then slots run out."""
        llm = engines(num_slots=700, host_bytes=host_bytes)
        faults = stores.opened[0].faults
        faults.hang.add("heads")
        ask(llm, text(rng, 300))
        tier = llm.engine.stores
        (pending,) = tier.writes._pending.values()
        tier._take_news(0, StoreNews((pending.record,)))
        tier._take_news(0, StoreNews((), (pending.record.key,)))
        for _ in range(4):
            ask(llm, text(rng, 300))
        assert llm.num_errors == 0
        faults.released.set()
        faults.hang.clear()
        assert llm.sync_stores(WAIT_S)
        llm.check()
        has_it = any(key == pending.record.key for _, key in stores.keys("one"))
        assert has_it == bool(host_bytes), "its K/V lay on the host meanwhile, or nowhere"


class TestFaults:
    @pytest.mark.parametrize(
        "struck",
        [
            ("fail", "read", "failed"),
            ("fail", "heads", "failed"),
            ("corrupt", "read", "corrupt"),
            ("corrupt", "heads", "corrupt"),
            ("truncate", "heads", "corrupt"),
            ("lose", "read", "missing"),
            ("lose", "heads", "missing"),
        ],
    )
    def test_what_cannot_be_read_is_computed(self, struck, stores, engines, rng):
        fault, method, outcome = struck
        document, question = text(rng, 400), text(rng, 50)
        first = engines()
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        full = ask(first, question, document, reuse="off")
        second = engines()
        assert second.sync_stores(WAIT_S)
        getattr(stores.faults, fault).add(method)
        output = ask(second, question, document)
        assert output.token_ids == full.token_ids
        assert output.report.miss.reason is MissReason.STORE
        assert output.report.computed_tokens == 450
        assert stored(second).reads[outcome] == 1
        assert second.num_errors == 0, "a store that fails is no error of the engine"

    def test_a_store_that_hangs_costs_a_request_its_patience_once(self, stores, engines, rng, monkeypatch):
        documents, second = impatient_with_a_store_that_hangs(
            stores, engines, rng, monkeypatch, num_documents=2, first_rest_s=WAIT_S
        )
        late = ask(second, text(rng, 50), documents[0])
        assert late.report.miss.reason is MissReason.STORE
        assert stored(second).reads["late"] == 1
        assert stored(second).is_resting
        next_one = ask(second, text(rng, 50), documents[1])
        assert next_one.report.miss.reason is MissReason.NOT_WORTH_IT, "it is not asked"
        stores.faults.released.set()

    def test_a_store_that_hung_is_read_again(self, stores, engines, rng, monkeypatch):
        """What nothing is read by is not believed for good."""
        documents, second = impatient_with_a_store_that_hangs(
            stores, engines, rng, monkeypatch, num_documents=6, first_rest_s=0.01
        )
        ask(second, text(rng, 50), documents[0])
        assert stored(second).reads["late"] == 1
        stores.faults.hang.clear()
        stores.faults.released.set()
        wait_until(lambda: stored(second).reads["hit"], second)  # what hung, which is too late
        second.engine.stores.flops_per_s = lambda: 1e8  # computing a document takes a second, a read a millisecond
        for _ in range(10):
            second.engine.stores.stores[0].reader.speed.observe(1 << 20, 60.0)
        monkeypatch.setattr(speed, "_BELIEVED_S", 0.0)
        monkeypatch.setattr(speed, "_HALF_LIFE_S", 0.01)
        for document in documents[1:]:
            time.sleep(0.05)
            ask(second, text(rng, 50), document)
        assert stored(second).reads["hit"] > 1

    def test_spans_that_came_are_grafted_without_those_that_did_not(self, stores, engines, rng):
        lost, kept, question = text(rng, 300), text(rng, 300), text(rng, 50)
        first, alone = engines(), engines(store="host")
        for llm in (first, alone):
            ask(llm, kept)
        before = set(stores.keys("one")) if first.sync_stores(WAIT_S) else set()
        ask(first, lost)
        assert first.sync_stores(WAIT_S)
        second = engines()
        assert second.sync_stores(WAIT_S)
        for space, key in set(stores.keys("one")) - before:
            stores.inner["one"].remove(space, key)
        output = ask(second, question, lost, kept)
        expected = ask(alone, question, lost, kept)
        assert tiers(output) == [("one", 299)]
        assert output.report.shifted_tokens == expected.report.shifted_tokens
        assert output.report.computed_tokens == expected.report.computed_tokens
        assert output.token_ids == expected.token_ids

    @pytest.mark.parametrize("method", ["keys", "heads"])
    def test_a_store_that_cannot_be_asked_is_a_store_without_donors(self, method, stores, engines, rng):
        first = engines()
        ask(first, text(rng, 300))
        first.close()

        dead = FaultyStore(stores.inner["one"], Faults(fail={method}))
        register_store("dead", lambda where, options: dead)
        second = engines(store="dead:")
        output = ask(second, text(rng, 300))
        assert not output.report.reused_tokens
        wait_until(lambda: stored(second).failed_looks, second)
        assert second.num_errors == 0

    def test_a_store_that_cannot_be_asked_is_not_in_step(self, stores, engines, rng):
        llm = engines()
        assert llm.sync_stores(WAIT_S) is True
        stores.faults.fail.add("keys")
        assert llm.sync_stores(WAIT_S) is False
        stores.faults.fail.clear()
        assert llm.sync_stores(WAIT_S) is True

    def test_a_full_store_is_counted(self, stores, engines, rng):
        llm = engines()
        stores.faults.full.add("put")
        ask(llm, text(rng, 300))
        assert llm.sync_stores(WAIT_S)
        assert stored(llm).writes["refused"] == 1
        stores.faults.full.clear()
        ask(llm, text(rng, 300))
        assert llm.sync_stores(WAIT_S)
        assert stored(llm).writes["stored"] == 1

    def test_a_store_that_rests_makes_nobody_wait_for_another_without_end(self, stores, engines, rng):
        """Between plan and read one of two stores goes to rest; how fast the engine computes is not known yet."""
        first = engines(store="one:,two:")
        for _ in range(2):
            ask(first, text(rng, 300))
        assert first.sync_stores(WAIT_S)
        llm = engines(slow=False, store="one:,two:")
        assert llm.sync_stores(WAIT_S)
        tier = llm.engine.stores
        donors = list(llm.space.donors)
        for number, donor in enumerate(donors):
            tier.stored.hold(donor.kv.key, number)
            tier.stored.lost(donor.kv.key, 1 - number)
        tier.stores[0].was_late()
        assert math.isinf(tier.stores[0].expected_s(300))
        stores.faults.hang.add("read")
        spans = [Match(300 * number, donor.donor_id, 0, 300) for number, donor in enumerate(donors)]
        reads = tier.begin_reads(spans, donors, 1e12)
        assert reads.deadline <= time.monotonic() + 30.0
        reads.cancel()


def test_a_graft_that_waits_for_its_repair_no_more_after_a_loss_keeps_its_windows(stores, engines, rng, monkeypatch):
    """Of a class that waits and a class that does not: the span that is left is repaired after the first token."""
    documents = [text(rng, 120), text(rng, 130)]
    first = engines("gemma2")
    for document in documents:
        ask(first, document)
    assert first.sync_stores(WAIT_S)
    llm = engines("gemma2", repair="after", repair_below_margin=0, repair_rows=0, selection="first_k")
    assert llm.sync_stores(WAIT_S)
    objects = stores.inner["one"].objects
    for space, key in list(objects):
        if decode_head(objects[space, key][0], space, key).record.num_tokens > 125:
            del objects[space, key]
    monkeypatch.setattr(
        llm.risk, "serve", lambda request, spans: Served(request.policy, waits=len(spans) == len(documents))
    )
    prompt = [text(rng, 20), documents[0], text(rng, 10), documents[1], text(rng, 30)]
    report = ask(llm, *prompt).report
    assert [span.length for span in report.spans] == [120]
    assert (report.repair.time, report.repair.from_token) == (RepairTime.AFTER, 2)


@pytest.mark.parametrize("begun", ["reader", "promotions"])
def test_threads_that_cannot_be_started_for_a_read_fail_no_request(begun, stores, engines, rng, monkeypatch):
    """The machine may have no more of them: the prompt is computed, or what it has read is not promoted."""
    document, question = text(rng, 400), text(rng, 50)
    first = engines()
    ask(first, document)
    assert first.sync_stores(WAIT_S)
    llm = engines()
    assert llm.sync_stores(WAIT_S)
    start = threading.Thread.start

    def started(thread):
        if begun in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started)
        report = ask(llm, question, document).report
    assert bool(report.shifted_tokens) == (begun == "promotions")
    assert llm.num_errors == 0, "both are counted as what stores do"
    llm.check()
    assert llm.usage().request == 0


def test_a_write_for_which_no_thread_can_be_started_is_over(stores, engines, rng, monkeypatch):
    llm, start = engines(), threading.Thread.start

    def started(thread):
        if "writer" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started)
        ask(llm, text(rng, 300))
    assert llm.sync_stores(WAIT_S)
    assert stored(llm).writes["dropped"] == 1
    ask(llm, text(rng, 300))
    assert llm.sync_stores(WAIT_S)
    assert stored(llm).writes["stored"] == 1
    llm.check()


class TestOverlap:
    """What happens to others, and to a request itself, while its K/V are on their way."""

    @pytest.fixture
    def hanging(self, stores, engines, rng):
        """An engine in which a request waits for a store, its document, and the answer without reuse."""
        document, question = text(rng, 400), text(rng, 50)
        first = engines()
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        llm = engines()
        assert llm.sync_stores(WAIT_S)
        stores.faults.hang.add("read")
        engine = llm.engine
        prompt = np.concatenate([question, document])
        engine.add(engine.builder.build(prompt, RequestOptions(FOUR, request_id="cold")))
        engine.step()
        assert [active.request.request_id for active in engine.scheduler.loading] == ["cold"]
        return llm, prompt

    @staticmethod
    def run(engine, name):
        for _ in range(100_000):
            for event in engine.step():
                if event.request_id == name and event.part is not None and event.part.output is not None:
                    return event.part.output
        raise AssertionError(f"{name} does not end")

    def test_one_that_fails_when_its_kv_have_come_fails_alone(self, hanging, stores, rng, monkeypatch):
        llm, prompt = hanging
        engine = llm.engine
        stores.faults.released.set()
        prefill = engine.manager.prefill

        def broken(kv):
            if kv.request.request_id == "cold":
                raise RuntimeError("no first step")
            return prefill(kv)

        monkeypatch.setattr(engine.manager, "prefill", broken)
        events = []
        while engine.scheduler.loading:
            events += engine.step()
        (failure,) = [event.error for event in events if event.request_id == "cold"]
        assert "no first step" in str(failure)
        assert not engine.has_work
        engine.check()
        assert engine.space.usage().request == 0
        engine.add(engine.builder.build(prompt, RequestOptions(FOUR, request_id="next")))
        assert len(self.run(engine, "next").token_ids) == 4

    def test_others_run_while_one_waits(self, hanging, stores, rng):
        llm, _ = hanging
        engine = llm._engine
        engine.add(engine.builder.build(text(rng, 200), RequestOptions(FOUR, request_id="other")))
        assert len(self.run(engine, "other").token_ids) == 4
        assert len(engine.scheduler.loading) == 1
        stores.faults.released.set()
        output = self.run(engine, "cold")
        assert tiers(output) == [("one", 399)]
        llm.check()

    def test_a_cancelled_request_lets_go_of_everything(self, hanging, stores):
        llm, _ = hanging
        assert llm.engine.cancel("cold")
        assert llm.usage().request == 0
        assert not llm.engine.has_work
        assert not any(llm.space.donors.is_pinned(donor.donor_id) for donor in llm.space.donors)
        stores.faults.released.set()
        llm.check()

    def test_a_preempted_request_begins_again(self, hanging, stores):
        llm, _ = hanging
        engine = llm.engine
        engine.scheduler.restart_loading()
        assert llm.usage().request == 0
        stores.faults.released.set()
        output = self.run(engine, "cold")
        assert output.num_preemptions == 1
        assert tiers(output) == [("one", 399)]

    def test_a_reset_takes_back_what_a_request_waits_for(self, hanging, stores):
        """Its weights are others now, and so must its answer be."""
        llm, prompt = hanging
        with torch.no_grad():
            for parameter in llm.loaded.model.parameters():
                parameter.mul_(1.05)
        llm.reset()
        stores.faults.released.set()
        output = self.run(llm.engine, "cold")
        assert not output.report.reused_tokens
        assert output.token_ids == ask(llm, prompt, reuse="off").token_ids


class TestReset:
    def test_other_weights_find_nothing_of_before(self, stores, engines, rng):
        document = text(rng, 300)
        llm = engines()
        ask(llm, document)
        assert llm.sync_stores(WAIT_S)
        name = llm.engine.stores.name
        with torch.no_grad():
            llm.loaded.model.get_input_embeddings().weight[7, 7] += 0.1
        llm.reset()
        assert llm.engine.stores.name != name
        assert llm.sync_stores(WAIT_S)
        assert not len(llm.space.donors)
        assert not ask(llm, text(rng, 20), document).report.reused_tokens
        assert llm.sync_stores(WAIT_S)
        assert len({space for space, _ in stores.keys("one")}) == 2

    def test_equal_weights_find_what_they_left(self, stores, engines, rng):
        """A reset forgets what the process holds; what is proved to be of these weights may come back."""
        document = text(rng, 300)
        llm = engines()
        ask(llm, document)
        assert llm.sync_stores(WAIT_S)
        llm.reset()
        assert not len(llm.space.donors)
        assert llm.sync_stores(WAIT_S)
        assert tiers(ask(llm, text(rng, 20), document)) == [("one", 299)]

    def test_what_waits_to_be_written_stays_in_its_own_space(self, stores, engines, rng):
        llm = engines()
        stores.faults.hang.add("heads")
        ask(llm, text(rng, 300))
        with torch.no_grad():
            next(llm.loaded.model.parameters()).mul_(1.1)
        name = llm.engine.stores.name
        llm.reset()
        stores.faults.released.set()
        assert llm.sync_stores(WAIT_S)
        assert {space for space, _ in stores.keys("one")} <= {name}
        assert not len(llm.space.donors)
        llm.check()

    def test_a_reset_that_fails_leaves_the_space_of_the_old_weights(self, stores, engines, rng, monkeypatch):
        document = text(rng, 300)
        llm = engines()
        ask(llm, document)
        assert llm.sync_stores(WAIT_S)
        before = set(stores.keys("one"))

        def fails(*_):
            raise MemoryError("no room for a digest")

        with monkeypatch.context() as patch:
            patch.setattr(store_space, "space_of", fails)
            with torch.no_grad():
                llm.loaded.model.get_input_embeddings().weight[7, 7] += 0.1
            with pytest.raises(MemoryError):
                llm.reset()
        assert not ask(llm, text(rng, 20), document).report.reused_tokens
        assert ask(llm, text(rng, 20), document).report.reused_tokens > 200, "memory serves as before"
        assert not llm.sync_stores(0.1)
        time.sleep(0.1)
        assert set(stores.keys("one")) == before
        assert not llm.space.donors.num_stored
        assert llm.num_errors == 0
        llm.reset()
        ask(llm, document)
        assert llm.sync_stores(WAIT_S)
        assert len(set(stores.keys("one")) - before) == 1, "in a space of its own"


class TestPlans:
    def test_what_is_computed_sooner_is_not_read_and_becomes_a_donor(self, stores, engines, rng):
        document = text(rng, 400)
        first = engines()
        ask(first, document)
        assert first.sync_stores(WAIT_S)
        second = engines()
        assert second.sync_stores(WAIT_S)
        second.engine.stores.flops_per_s = lambda: 1e30
        fast = ask(second, text(rng, 20), document)
        assert fast.report.miss.reason is MissReason.NOT_WORTH_IT
        assert stored(second).reads["hit"] == 0
        assert [tier for tier, _ in tiers(ask(second, text(rng, 30), document))] == ["device"]
        assert second.sync_stores(WAIT_S)
        assert sum(record.num_tokens >= 400 for record in stores.records("one")) == 1, "it is not stored again"

    def test_score_reads_too_and_waits(self, stores, engines, rng):
        document, question = text(rng, 400), text(rng, 30)
        first = engines()
        ask(first, document)
        expected = first.score(np.concatenate([question, document]), [5, 6])
        assert first.sync_stores(WAIT_S)
        second = engines()
        assert second.sync_stores(WAIT_S)
        score = second.score(np.concatenate([question, document]), [5, 6])
        assert score.report.spans[0].tier == "one"
        assert torch.equal(score.logits, expected.logits)

    def test_without_a_store_nothing_is_opened(self, engines):
        llm = engines(store="host")
        assert llm.engine.stores is None
        assert not llm.sync_stores(0.0)

    def test_a_store_that_cannot_be_opened_is_said_before_anything_runs(self, engines):
        with pytest.raises(ConfigError, match="nowhere"):
            engines(store="nowhere:x")

    def test_cold_donors_leave_for_those_in_memory(self, stores, engines, rng):
        """A catalogue that is full takes no donors of others, and drops them for its own."""
        first = engines()
        for _ in range(4):
            ask(first, text(rng, 300))
        assert first.sync_stores(WAIT_S)
        second = engines(donor_tokens=1000)
        assert second.sync_stores(WAIT_S)
        assert second.space.donors.num_stored == 3
        for _ in range(3):
            ask(second, text(rng, 300))
        assert sum(not isinstance(donor.kv, StoredKV) for donor in second.space.donors) == 3
