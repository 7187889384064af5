"""A semantic provider: what it names is copied, called substituted, and never waited for longer than the deadline."""

from __future__ import annotations

import threading

import pytest
from tests.unit.integrations.sglang.conftest import FakeRequest

from kvgraft.errors import ConfigError
from kvgraft.integrations.sglang.planning.semantic import SemanticSource, load_provider
from kvgraft.prefix.semantic import SemanticPrefixProvider, SemanticPrefixResult


class Recall(SemanticPrefixProvider):
    """Names the last prompt that was stored."""

    def __init__(self):
        self.stored, self.initialised = None, 0

    def on_init(self, model_config=None):
        self.initialised += 1

    def on_prefix_miss(self, rid, token_ids):
        assert not token_ids.flags.writeable
        return None if self.stored is None else SemanticPrefixResult(self.stored.tolist(), 0, source_id="last")

    def on_request_cached(self, rid, token_ids):
        self.stored = token_ids


class Stuck(Recall):
    """Answers when it is told to."""

    release = threading.Event()

    def on_prefix_miss(self, rid, token_ids):
        self.release.wait(30)


class Broken(Recall):
    """Fails."""

    def on_prefix_miss(self, rid, token_ids):
        raise RuntimeError("no")


def attach(world, provider, deadline_s=60.0):
    world.reuse.semantic = SemanticSource(provider, world.tree, 1, deadline_s)
    return provider


def test_stand_in_is_copied_and_called_substituted(make_world, make_tokens):
    world = make_world()
    attach(world, Recall())
    stored = make_tokens(50)
    world.publish("stored", stored)
    req = FakeRequest("query", make_tokens(40))
    assert world.reuse.promise(req, req.origin_input_ids, 39, 0) == 39
    assert world.reuse.load_first(req, 39) == 39
    assert req.skip_radix_cache_insert
    req.is_finished, req.owned = True, 40
    world.reuse.adopt_computed(req, None, None)
    assert world.reuse.adopted(req) == []
    world.reuse.released(req)
    attempt = world.log.take(req)["attempts"][0]
    assert (attempt["substituted_tokens"], attempt["shifted_tokens"]) == (39, 0)
    assert attempt["spans"][0]["fidelity"] == "substituted"
    world.conserved(private=39)


def test_provider_is_not_asked_where_donors_or_a_prefix_are_found(make_world, make_tokens):
    world = make_world()
    provider = attach(world, Recall())
    stored = make_tokens(50)
    world.publish("stored", stored)
    provider.on_prefix_miss = lambda **_: pytest.fail("asked")
    req = FakeRequest("query", make_tokens(3) + stored[:40] + make_tokens(3))
    world.reuse.promise(req, req.origin_input_ids, 45, 0)
    other = FakeRequest("other", make_tokens(50))
    assert world.reuse.promise(other, other.origin_input_ids, 49, 10) == 0


@pytest.mark.parametrize("provider", [Stuck, Broken])
def test_stuck_or_broken_provider_is_a_miss(make_world, make_tokens, provider):
    world = make_world()
    attach(world, provider(), deadline_s=0.05)
    for rid in ("first", "second"):
        req = FakeRequest(rid, make_tokens(40))
        assert world.reuse.promise(req, req.origin_input_ids, 39, 0) == 0
    Stuck.release.set()


def test_providers_are_loaded_by_name():
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_provider("absent_module:Class", None)
    with pytest.raises(ConfigError, match=r"no kvgraft\.prefix\.SemanticPrefixProvider"):
        load_provider("collections:OrderedDict", None)
