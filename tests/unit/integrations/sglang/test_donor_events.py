"""Donors among SGLang's events: read by our reader as those of other engines are, whosever they are."""

from __future__ import annotations

import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import ConfigError
from kvgraft.events import decode_batch
from kvgraft.integrations.sglang.donor_events import DonorEvents, require_events
from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.reuse.donor_events import donor_generation, donor_scope, is_donor, scope_of

msgspec = pytest.importorskip("msgspec")

TEXT = list(range(40))


@pytest.fixture
def catalogue():
    return DonorCatalogue(1_000)


def read(events):
    """As SGLang writes a batch."""
    return decode_batch(msgspec.msgpack.encode([1.0, events.take(), 0])).events


@pytest.mark.parametrize(
    ("names", "scope"),
    [
        ((None, None, None), scope_of()),
        ((None, None, "salt"), scope_of(None, "salt")),
        (("adapter", None, "salt"), scope_of("adapter", "salt")),
    ],
)
def test_what_is_told_is_read(catalogue, names, scope):
    events = DonorEvents(catalogue, "model")
    donor = catalogue.add(request_namespace("model", *names), TEXT, None, generation=1).donor
    catalogue.remove(donor.donor_id)
    stored, removed = read(events)
    assert is_donor(stored)
    assert is_donor(removed)
    assert stored.block_hashes == removed.block_hashes
    assert (stored.token_ids, donor_generation(stored), donor_scope(stored).scope) == (tuple(TEXT), 1, scope)
    assert events.take() == []


def test_text_under_an_extra_key_is_nobodys_that_a_router_could_ask_for(catalogue):
    events = DonorEvents(catalogue, "model")
    catalogue.add(request_namespace("model", None, "key", "salt"), TEXT, None)
    (stored,) = read(events)
    assert donor_scope(stored).scope not in (scope_of(), scope_of(None, "salt"), scope_of(None, "key"))


def test_a_server_that_publishes_nothing_does_not_start():
    require_events(are_published=True)
    with pytest.raises(ConfigError, match="start it with --kv-events-config"):
        require_events(are_published=False)
