"""Donors among KV events: ours are known again in every form of the wire, and hang from no page that a cache stores."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.donors.front import front_digest
from kvgraft.events import BlockRemoved, BlockStored, EventLog
from kvgraft.prefix import RadixCache, RadixKey
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.reuse.donor_events import (
    DONOR_PARENT,
    DonorPlace,
    donor_generation,
    donor_place,
    donor_removed,
    donor_scope,
    donor_stored,
    is_donor,
    scope_of,
    tokens_before,
)
from kvgraft.types import Namespace

pytest.importorskip("msgspec")

from kvgraft.events import EventBatch, decode_batch, encode_batch

TEXT = np.arange(40, dtype=np.int32)
ALICE = Namespace("model", "adapter", "salt of alice")


def donor_of(catalogue, namespace=ALICE, text=TEXT):
    return catalogue.add(namespace, text, kv=None).donor


@pytest.fixture
def catalogue():
    return DonorCatalogue(1_000)


@pytest.mark.parametrize("as_arrays", [False, True])
def test_what_is_announced_is_read_again(catalogue, as_arrays):
    donor = donor_of(catalogue)
    sent = EventBatch(1.0, (donor_stored(donor), donor_removed(donor)))
    stored, removed = decode_batch(encode_batch(sent, as_arrays=as_arrays)).events
    assert is_donor(stored)
    assert is_donor(removed)
    assert stored.token_ids == tuple(TEXT)
    assert (len(stored.block_hashes), stored.block_size) == (1, len(TEXT))
    assert stored.block_hashes == removed.block_hashes
    whose = donor_scope(stored)
    assert (whose.namespace_key, whose.scope) == (ALICE.key.hex(), scope_of("adapter", "salt of alice"))


@pytest.mark.parametrize("as_arrays", [False, True])
@pytest.mark.parametrize("generation", [0, 2])
def test_the_generation_is_told_and_hides_nothing_else(catalogue, as_arrays, generation):
    donor = catalogue.add(ALICE, TEXT, None, generation=generation).donor
    (stored,) = decode_batch(encode_batch(EventBatch(1.0, (donor_stored(donor),)), as_arrays=as_arrays)).events
    assert donor_generation(stored) == generation
    assert donor_scope(stored).scope == scope_of("adapter", "salt of alice")
    (alone,) = decode_batch(
        encode_batch(EventBatch(1.0, (donor_stored(replace(donor, namespace=KeyAlone(ALICE.key))),)))
    ).events
    assert (donor_generation(alone), donor_scope(alone).scope) == (generation, None)


def test_what_is_no_generation_counts_as_none(catalogue):
    stored = donor_stored(donor_of(catalogue))
    assert not any(isinstance(key, int) for key in stored.extra_keys[0]), "as before there were generations on the wire"
    for extra_keys in (None, (), (None,), (("key", "scope"),), (("key", True),), (("key", -3),), (("key", "2"),)):
        assert donor_generation(replace(stored, extra_keys=extra_keys)) == 0


def test_the_salt_is_not_sent(catalogue):
    donor = donor_of(catalogue)
    payload = encode_batch(EventBatch(1.0, (donor_stored(donor), donor_removed(donor))))
    assert b"alice" not in payload


def test_scopes_of_other_adapters_and_salts_differ():
    texts = ["", "a", "b", "ab"]
    pairs = list(itertools.product(texts, texts))
    assert len({scope_of(*pair) for pair in pairs}) == len(pairs)
    assert scope_of(None, None) == scope_of("", "")


def test_two_donors_of_one_text_are_two(catalogue):
    first, second = donor_of(catalogue), donor_of(catalogue)
    assert donor_stored(first).block_hashes != donor_stored(second).block_hashes


def test_pages_are_no_donors_and_never_hang_below_one(catalogue):
    log = EventLog()
    cache = RadixCache(1, events=log)
    cache.insert(RadixKey(TEXT), np.arange(len(TEXT)))
    log.announce(donor_stored(donor_of(catalogue)))
    cache.insert(RadixKey((*TEXT, 7)), np.arange(len(TEXT) + 1))
    page, donor, more = log.take()
    assert [is_donor(event) for event in (page, donor, more)] == [False, True, False]
    assert DONOR_PARENT not in page.block_hashes
    assert donor.parent_block_hash == DONOR_PARENT
    assert more.parent_block_hash == page.block_hashes[-1]
    assert not is_donor(BlockRemoved(page.block_hashes, "GPU"))


def test_a_donor_without_a_namespace_is_nobodys(catalogue):
    stored = donor_stored(donor_of(catalogue))
    for extra_keys in (None, (), (None,), ((),), ((b"bytes",),), (("one",), ("two",)), (("key",),)):
        assert donor_scope(replace(stored, extra_keys=extra_keys)) is None
    assert donor_scope(replace(stored, extra_keys=((ALICE.key.hex(),),))).scope is None
    assert is_donor(BlockStored((1,), DONOR_PARENT, (1,), 1)), "also where a reader leaves out what it does not know"


def test_an_announcer_tells_of_what_comes_and_goes(catalogue):
    events = []
    catalogue.watch(DonorAnnouncer(events.append))
    first, second, third = (donor_of(catalogue, text=TEXT + shift) for shift in (0, 100, 200))
    catalogue.remove(second.donor_id)
    catalogue.reset()
    stored = {event.block_hashes: donor for event, donor in zip(events[:3], (first, second, third), strict=True)}
    assert all(isinstance(event, BlockStored) for event in events[:3])
    assert [stored[event.block_hashes] for event in events[3:]] == [second, first, third]
    assert all(is_donor(event) for event in events)


class KeyAlone:
    """A namespace as it is known of a donor that was read from a store."""

    def __init__(self, key):
        self.key = key


def test_an_engine_may_call_salts_otherwise_than_clients_do(catalogue):
    events = []
    announcer = DonorAnnouncer(events.append, ALICE, lambda namespace: scope_of(None, namespace.tenant_salt[-5:]))
    donor = donor_of(catalogue)
    announcer.donor_added(donor, None)
    announcer.donor_added(replace(donor, namespace=KeyAlone(ALICE.key)), None)
    assert [donor_scope(event).scope for event in events] == [scope_of(None, "alice")] * 2


def test_a_donor_that_is_known_by_its_key_is_everyones_only_if_the_key_says_so(catalogue):
    events = []
    common = Namespace("model")
    announcer = DonorAnnouncer(events.append, common)
    donor = donor_of(catalogue)
    for key in (common.key, ALICE.key):
        announcer.donor_added(replace(donor, namespace=KeyAlone(key)), None)
    assert [donor_scope(event).scope for event in events] == [scope_of(), None]


BEFORE = np.arange(5_000, 5_300, dtype=np.int32)


def announced_in_its_place(catalogue, namespace, generation=1, before=BEFORE, **options):
    """The events of a text that was computed after `before`."""
    events = []
    catalogue.watch(DonorAnnouncer(events.append, **options))
    front = front_digest(namespace.key, BEFORE)
    place = {"generation": generation, "start_position": len(BEFORE), "front": front}
    catalogue.add(namespace, TEXT, None, before=before, **place)
    return events


@pytest.mark.parametrize("as_arrays", [False, True])
def test_an_event_says_where_a_text_stands_and_what_stood_before_it(catalogue, as_arrays):
    common = Namespace("model")
    sent = announced_in_its_place(catalogue, common, sends_fronts=True)
    (stored,) = decode_batch(encode_batch(EventBatch(1.0, tuple(sent)), as_arrays=as_arrays)).events
    assert donor_place(stored) == DonorPlace(300, front_digest(common.key, BEFORE), goes_on=True)
    before = tokens_before(stored)
    assert (before.base, before.token_ids.tolist()) == (b"", BEFORE.tolist())
    assert (donor_generation(stored), donor_scope(stored).scope) == (1, scope_of())
    assert donor_scope(stored).namespace.key == common.key


@pytest.mark.parametrize(
    ("namespace", "options", "goes_on"),
    [
        (Namespace("model"), {}, True),
        (ALICE, {"sends_fronts": True}, True),
        (Namespace("model"), {"sends_fronts": True, "generation": 0}, False),
        (Namespace("model"), {"sends_fronts": True, "before": None}, False),
    ],
)
def test_tokens_before_are_sent_of_what_can_be_computed_again_alone(catalogue, namespace, options, goes_on):
    (stored,) = announced_in_its_place(catalogue, namespace, **options)
    assert tokens_before(stored) is None
    assert donor_place(stored) == DonorPlace(300, front_digest(namespace.key, BEFORE), goes_on)


def test_what_stands_at_the_beginning_says_so(catalogue):
    assert donor_place(donor_stored(donor_of(catalogue))) == DonorPlace(0, b"")


@pytest.mark.parametrize(
    "text",
    [
        "at:", "at:3", "at:-3:", "at:x:", "at:3:ff", "at:3:" + "g" * 64, "at:" + "9" * 30 + ":", "before:",
        "at:²:", "before::AAA", "before::AAA=", "before:ff:AAAAAA==", "before::\u00e9", "place:3:",
    ],
)  # fmt: skip
def test_what_is_no_place_and_no_text_counts_as_none(catalogue, text):
    stored = donor_stored(donor_of(catalogue))
    stored = replace(stored, extra_keys=((*stored.extra_keys[0][:2], text),))
    place, before = donor_place(stored), tokens_before(stored)
    assert place in (None, DonorPlace(3, b""))
    assert before is None or not len(before.token_ids)
    assert donor_scope(stored).scope == scope_of("adapter", "salt of alice")


def test_an_event_of_a_sender_that_says_nothing_of_places_is_read_as_ever(catalogue):
    stored = donor_stored(donor_of(catalogue))
    stored = replace(stored, extra_keys=(stored.extra_keys[0][:2],))
    assert (donor_place(stored), tokens_before(stored), donor_generation(stored)) == (None, None, 0)
    assert donor_scope(stored).scope == scope_of("adapter", "salt of alice")


def test_readers_of_digests_alone_pass_the_place_over(catalogue):
    """What such a reader does: the first two texts are the namespace and the scope."""
    (stored,) = announced_in_its_place(catalogue, Namespace("model"), sends_fronts=True)
    texts = [key for key in stored.extra_keys[0] if isinstance(key, str)]
    assert texts[:2] == [Namespace("model").key.hex(), scope_of()]
