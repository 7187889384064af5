"""What is known of a worker against a plain model of it: never more than it holds, and of prefixes exactly that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.router.engine_model import EngineModel, covered, page_hash, scope

from kvgraft.donors import DonorCatalogue
from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLog, decode_batch, encode_batch
from kvgraft.events.log import NAMESPACE_SALT
from kvgraft.prefix import RadixCache, RadixKey
from kvgraft.reuse.donor_events import donor_removed, donor_stored, scope_of
from kvgraft.router.chains import BlockChains, BlockRun
from kvgraft.router.held_text import HeldText
from kvgraft.types import Namespace

SALTS = ("", "alice")
PARTS = [tuple(range(100 * i, 100 * i + length)) for i, length in enumerate((40, 48, 7, 64, 16, 33))]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(lambda parts: [t for part in parts for t in part])


def ids(tokens):
    return np.array(tokens, np.int32)


class WorkerMachine(RuleBasedStateMachine):
    """An engine stores and loses pages in two media; after each event the index knows what the model knows."""

    @initialize(page_size=st.sampled_from([1, 4, 16]), grafts=st.booleans())
    def start(self, page_size, grafts):
        self.engine = EngineModel(page_size)
        self.index = HeldText(grafts=grafts, max_tokens=100_000)
        self.lost_any = False
        self.prompts = [[1, 2, 3]]

    @rule(text=TEXTS, salt=st.sampled_from(SALTS), medium=st.sampled_from(["GPU", "CPU"]))
    def store(self, text, salt, medium):
        self.prompts.append(text)
        self.index.apply(self.engine.store(text, salt, medium))

    @precondition(lambda self: self.engine.pages)
    @rule(data=st.data(), medium=st.sampled_from(["GPU", "CPU"]))
    def remove(self, data, medium):
        present = [name for name, page in self.engine.pages.items() if medium in page[3]]
        if not present:
            return
        gone = data.draw(st.lists(st.sampled_from(present), min_size=1, max_size=8, unique=True))
        self.index.apply([self.engine.remove(gone, medium)])
        self.lost_any = True

    @rule()
    def clear(self):
        self.index.apply([self.engine.clear()])
        self.lost_any = False

    @rule(prompt=TEXTS, ending=st.sampled_from([(), (7, 7, 7)]), salt=st.sampled_from(SALTS))
    def look_up(self, prompt, ending, salt):
        self._compare([*prompt, *ending], salt)

    @rule(data=st.data(), shift=st.integers(0, 9), salt=st.sampled_from(SALTS))
    def look_up_shifted(self, data, shift, salt):
        prompt = data.draw(st.sampled_from(self.prompts))
        self._compare([*range(5000, 5000 + shift), *prompt], salt)

    def _compare(self, prompt, salt):
        found = self.index.held(scope(salt), ids(prompt))
        assert found.exact == self.engine.exact(prompt, salt)
        if not self.index.grafts:
            assert found.shifted == 0
            return
        runs = list(self.engine.held_runs(salt))
        most = set().union(*(covered(prompt, found.exact, text, held, 1) for text, held in runs))
        assert found.shifted <= len(most), "more than is held"
        if not self.lost_any:
            least = set().union(*(covered(prompt, found.exact, text, held, 32) for text, held in runs))
            assert found.shifted >= len(least), "a run of 32 tokens is always found"

    @invariant()
    def is_consistent(self):
        if hasattr(self, "index"):
            self.index.check()


def test_a_text_whose_first_page_was_lost_in_another_medium_is_held_in_full():
    """Drawn by the machine: the model of the engine forgot what comes after a page that lies elsewhere."""
    machine = WorkerMachine()
    machine.start(page_size=1, grafts=True)
    text = [*PARTS[0], *PARTS[1]]
    machine.store(list(PARTS[0]), "", "CPU")
    first, second = (own for own, _, _ in machine.engine.chain(text)[:2])
    machine.index.apply([machine.engine.remove([first], "CPU")])
    machine.lost_any = True
    machine.store(text, "", "GPU")
    machine.index.apply([machine.engine.remove([second], "GPU")])
    assert machine.index.held(scope(), ids([5000, *text])).shifted == len(text) - 1
    machine._compare([5000, *text], "")


TestWorkers = WorkerMachine.TestCase
TestWorkers.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_within_its_memory_chains_keep_what_is_true():
    engine, chains = EngineModel(4), BlockChains(max_bytes=6_000)
    rng = np.random.default_rng(5)
    for _ in range(300):
        text = [int(t) for t in rng.integers(0, 3, 40)]
        for event in engine.store(text):
            chains.stored(event)
        chains.check()
        assert chains.num_bytes <= 6_000
        assert chains.match(scope(), ids(text)) <= engine.exact([*text, 0])
    assert chains.num_tokens


def test_what_was_extended_last_stays():
    engine, chains = EngineModel(4), BlockChains(max_bytes=4_000)
    system = list(range(8))
    for number in range(50):
        for event in engine.store([*system, *range(100 * number + 50, 100 * number + 58)]):
            chains.stored(event)
        chains.check()
    assert chains.match(scope(), ids(system)) == 8, "every chain goes through it"


def test_a_chain_of_many_events_does_not_grow_with_its_square():
    """An event touches its own run, not all of those in front: counted, for clocks say nothing here."""
    chains, touched = BlockChains(1 << 30), 0
    note = chains._may_leave

    def counted(run):
        nonlocal touched
        touched += 1
        note(run)

    chains._may_leave = counted
    for page in range(2_000):
        chains.stored(BlockStored((page,), page - 1 if page else None, (page,), 1))
    assert touched == 2_000
    assert len(chains._oldest) <= 2 * 2_000 + 64
    chains.check()
    assert chains.match(scope(), ids(range(2_000))) == 2_000


def test_the_parent_of_what_has_left_is_as_young_as_that_was():
    """The limit takes what was extended longest ago, also where its end has left meanwhile."""
    size = BlockRun(0, "", None, ids([1]), 1, (1,), bytearray(1)).num_bytes
    chains = BlockChains(3 * size)
    chains.stored(BlockStored((1,), None, (1,), 1))
    chains.stored(BlockStored((2,), None, (2,), 1))
    chains.stored(BlockStored((3,), 1, (3,), 1))
    chains.removed(BlockRemoved((3,)))
    chains.check()
    chains.stored(BlockStored((4,), None, (4,), 1))
    chains.stored(BlockStored((5,), None, (5,), 1))
    chains.check()
    assert [chains.match(scope(), ids([token])) for token in (1, 2, 4, 5)] == [1, 0, 1, 1]


def test_a_salt_cannot_pass_for_the_namespace_of_another():
    log = EventLog()
    salt = NAMESPACE_SALT + "00" * 16
    RadixCache(1, events=log).insert(RadixKey((1, 2), extra_key=None, cache_salt=salt), np.arange(2))
    (event,) = log.take()
    assert not event.cache_salt.startswith(NAMESPACE_SALT)


def event_of(text, parent=None, **fields):
    engine = EngineModel(4)
    (event,) = engine.store(text)
    return BlockStored(event.block_hashes, parent, event.token_ids, 4, **fields)


TEXT = list(range(40))


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": ((("image", 3),), *[None] * 9)},
        {"extra_keys": (("alice", "more"), *[None] * 9)},
        {"parent": 99},
        {"extra_keys": ((b"embedding",), *[None] * 9)},
        {"lora_id": 3},
        {"extra_keys": (None, ("hash of an image",), *[None] * 8)},
        {"extra_keys": (("kvgraft-namespace:" + "0" * 32,), *[None] * 9)},
        {"lora_name": "tuned", "extra_keys": (("tuned", "tuned"), *[("tuned",)] * 9)},
    ],
)
def test_pages_that_tokens_alone_do_not_name_are_left_out(fields):
    index = HeldText(grafts=True, max_tokens=1_000)
    index.apply([event_of(TEXT, **fields)])
    assert index.held(scope(), ids(TEXT)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({"cache_salt": "alice"}, "alice"),
        ({"extra_keys": (("alice",), *[None] * 9)}, "alice"),
        ({"extra_keys": (("alice",), *[None] * 9), "medium": "CPU"}, "alice"),
        ({}, ""),
    ],
)
def test_salts_are_kept_apart_however_an_engine_writes_them(fields, salt):
    index = HeldText(grafts=True, max_tokens=1_000)
    index.apply([event_of(TEXT, **fields)])
    for asked in ("", "alice", "bob"):
        expected = (36, 0, 0) if asked == salt else (0, 0, 0)
        assert index.held(scope(asked), ids(TEXT)) == expected
        assert index.held(scope(asked), ids([9, 9, *TEXT])).shifted == (39 if asked == salt else 0)


def test_an_image_behind_text_ends_what_is_known():
    index = HeldText(grafts=False, max_tokens=1_000)
    front = event_of(TEXT[:20])
    behind = BlockStored((1,), front.block_hashes[-1], tuple(TEXT[20:24]), 4, extra_keys=(("hash of an image",),))
    index.apply([front, behind])
    assert index.held(scope(), ids(TEXT)).exact == 20


def test_a_salt_may_be_called_as_the_adapter():
    index = HeldText(grafts=False, max_tokens=1_000)
    index.apply([event_of(TEXT, lora_name="tuned", extra_keys=(("tuned", "tuned"), *[("tuned",)] * 9))])
    assert index.held(scope_of("tuned"), ids(TEXT)).exact == 0
    assert index.held(scope_of("tuned", "tuned"), ids(TEXT)).exact == 36


@pytest.mark.parametrize("owner", [("tuned", ""), ("", "tuned")], ids=["adapter", "salt"])
def test_an_adapter_called_as_a_salt_is_another_owner(owner):
    """vllm#42119, #44250, #53495: an adapter without a salt has the keys of its name as a salt without an adapter."""
    adapter, salt = owner
    index = HeldText(grafts=True, max_tokens=1_000)
    behind = ("tuned",) if adapter else None
    index.apply([event_of(TEXT, lora_name=adapter or None, extra_keys=(("tuned",), *[behind] * 9))])
    assert index.held(scope_of(adapter, salt), ids(TEXT)).exact == 36
    assert index.held(scope_of(salt, adapter), ids([9, 9, *TEXT])) == index.held(scope_of(), ids(TEXT)) == (0, 0, 0)


@pytest.mark.parametrize("as_arrays", [False, True])
def test_salts_survive_the_wire(as_arrays):
    index = HeldText(grafts=False, max_tokens=1_000)
    front = event_of(TEXT[:20], cache_salt="alice")
    behind = BlockStored((1,), front.block_hashes[-1], tuple(TEXT[20:24]), 4, cache_salt="alice")
    for event in (front, behind):
        index.apply(decode_batch(encode_batch(EventBatch(1.0, (event,)), as_arrays=as_arrays)).events)
    assert index.held(scope(), ids(TEXT)).exact == 0
    assert index.held(scope("alice"), ids(TEXT)).exact == 24


def test_window_layers_count_for_nothing():
    """vLLM tells of the same hash once per group of layers; that the window has left a page says nothing of the others."""
    index = HeldText(grafts=False, max_tokens=1_000)
    full, window = ({"group_idx": 0}, {"group_idx": 1, "kv_cache_spec_sliding_window": 8})
    stored = event_of(TEXT, **full)
    index.apply([event_of(TEXT, **window), stored])
    assert index.held(scope(), ids(TEXT)).exact == 36
    index.apply([BlockRemoved(stored.block_hashes[:3], "GPU", group_idx=1)])
    assert index.held(scope(), ids(TEXT)).exact == 36
    index.apply([BlockRemoved(stored.block_hashes[:1], "GPU", group_idx=0)])
    assert index.held(scope(), ids(TEXT)).exact == 0


# donors


@pytest.fixture
def catalogue():
    return DonorCatalogue(10_000)


def add(catalogue, text, salt=""):
    return catalogue.add(Namespace("model", "", salt), np.array(text), None).donor


def test_whoever_announces_donors_is_believed_about_these_alone(catalogue):
    index = HeldText(grafts=True, max_tokens=10_000)
    index.apply([event_of(TEXT)])
    assert index.held(scope(), ids([9, *TEXT])).shifted == 39
    other = list(range(500, 560))
    donor = add(catalogue, other)
    index.apply([donor_stored(donor)])
    assert index.held(scope(), ids([9, *TEXT])) == (0, 0, 0), "its pages may lie where grafts do not read"
    assert index.held(scope(), ids(TEXT)).exact == 36
    assert index.held(scope(), ids([9, *other])).shifted == 59
    index.apply([donor_removed(donor)])
    assert index.held(scope(), ids([9, *other])) == (0, 0, 0)
    index.check()


def test_announcing_donors_is_enough_to_count_as_grafting(catalogue):
    index = HeldText(grafts=False, max_tokens=10_000)
    index.apply([donor_stored(add(catalogue, TEXT))])
    assert index.held(scope(), ids([9, *TEXT])).shifted == 39


def test_a_donor_is_no_prefix_even_where_it_stands_in_front(catalogue):
    index = HeldText(grafts=False, max_tokens=10_000)
    index.apply([donor_stored(add(catalogue, TEXT))])
    assert index.held(scope(), ids(TEXT)) == (0, 39, 0)


def test_donors_of_other_tenants_are_not_seen(catalogue):
    index = HeldText(grafts=False, max_tokens=10_000)
    index.apply([donor_stored(add(catalogue, TEXT, "alice"))])
    assert index.held(scope(), ids([9, *TEXT])) == (0, 0, 0)
    assert index.held(scope("alice"), ids([9, *TEXT])).shifted == 39


def test_a_donor_known_by_its_key_counts_as_soon_as_the_key_is_known(catalogue):
    """After a restart donors come back from a store without their salt; one that is computed anew tells whose they are."""
    index = HeldText(grafts=False, max_tokens=10_000)
    cold, warm = donor_stored(add(catalogue, TEXT, "alice")), donor_stored(add(catalogue, range(600, 640), "alice"))
    nameless = BlockStored(
        **{name: getattr(cold, name) for name in cold.__slots__} | {"extra_keys": (cold.extra_keys[0][:1],)}
    )
    index.apply([nameless])
    assert index.held(scope("alice"), ids([9, *TEXT])).shifted == 0
    index.apply([warm])
    assert index.held(scope("alice"), ids([9, *TEXT])).shifted == 39
    assert index.held(scope(), ids([9, *TEXT])).shifted == 0


def test_donors_within_the_limit_of_memory(catalogue):
    index = HeldText(grafts=False, max_tokens=200)
    donors = [add(catalogue, range(100 * number, 100 * number + 60)) for number in range(1, 20)]
    index.apply([donor_stored(donor) for donor in donors])
    index.check()
    assert index.num_shifted_tokens <= 200
    index.apply([donor_removed(donor) for donor in donors])
    assert index.num_shifted_tokens == 0
    assert index.held(scope(), ids([9, *donors[-1].token_ids])) == (0, 0, 0)


def test_a_reset_forgets_pages_and_donors(catalogue):
    index = HeldText(grafts=True, max_tokens=1_000)
    index.apply([event_of(TEXT), donor_stored(add(catalogue, TEXT)), AllBlocksCleared()])
    assert index.held(scope(), ids([9, *TEXT])) == index.held(scope(), ids(TEXT)) == (0, 0, 0)
    assert index.num_exact_tokens == index.num_shifted_tokens == 0


def test_nonsense_changes_nothing():
    index = HeldText(grafts=True, max_tokens=1_000)
    name = page_hash(None, (1,), "")
    index.apply(
        [
            BlockStored((), None, (), 4),
            BlockStored((name,), None, (1, 2, 3), 4),
            BlockStored((name,), None, (), 0),
            BlockStored((name, name), None, tuple(range(8)), 4),
            BlockRemoved((name, 5)),
        ]
    )
    index.check()
    assert index.num_exact_tokens == 0


def test_pages_of_a_namespace_are_its_tenants_as_soon_as_donors_say_whose_it_is(catalogue):
    """The embedded engine names a tenant by the key of its namespace alone."""
    donor = add(catalogue, range(600, 640), "alice")
    index = HeldText(grafts=True, max_tokens=10_000)
    index.apply([event_of(TEXT, cache_salt=NAMESPACE_SALT + donor.namespace.key.hex())])
    for salt in ("", "alice"):
        assert index.held(scope(salt), ids(TEXT)) == (0, 0, 0)
    index.apply([donor_stored(donor)])
    assert index.held(scope("alice"), ids(TEXT)).exact == 36
    assert index.held(scope(), ids(TEXT)) == index.held(scope("bob"), ids(TEXT)) == (0, 0, 0)


def test_a_worker_is_full_when_what_comes_displaces_what_is_there(catalogue):
    index = HeldText(grafts=False, max_tokens=100_000)
    index.apply([event_of(TEXT)])
    donors = [add(catalogue, range(600 * number, 600 * number + 500)) for number in range(1, 20)]
    for donor in donors[:10]:
        index.apply([donor_stored(donor)])
    assert (index.is_full, index.num_tokens) == (False, 5_000)
    index.apply([donor_removed(donors[0])])
    assert not index.is_full, "one that goes may have had another reason"
    for old, new in zip(donors[1:9], donors[10:18], strict=True):
        index.apply([donor_removed(old), donor_stored(new)])
    assert (index.is_full, index.num_tokens) == (True, 4_500)
    index.apply(
        [donor_stored(add(catalogue, range(100_000 + 600 * number, 100_500 + 600 * number))) for number in range(19)]
    )
    assert not index.is_full, "it has room again"
    index.apply([AllBlocksCleared()])
    assert (index.is_full, index.num_tokens) == (False, 0)


def test_the_first_donor_is_no_loss_of_pages(catalogue):
    index = HeldText(grafts=True, max_tokens=100_000)
    index.apply([event_of(TEXT), donor_stored(add(catalogue, range(500, 530)))])
    assert (index.is_full, index.num_tokens) == (False, 30)


def test_an_engine_without_donors_is_full_when_its_pages_go():
    engine, index = EngineModel(16), HeldText(grafts=False, max_tokens=100_000)
    texts = [list(range(1000 * number, 1000 * number + 160)) for number in range(6)]
    for text in texts[:4]:
        index.apply(engine.store(text))
    assert (index.is_full, index.num_tokens) == (False, 640)
    for old, new in ((0, 4), (1, 5), (2, 0), (3, 1), (4, 2)):
        index.apply([engine.remove([name for name, _, _ in engine.chain(texts[old])], "GPU")])
        index.apply(engine.store(texts[new]))
    assert (index.is_full, index.num_tokens) == (True, 640)
