"""Another text in SGLang: what a provider names is copied where it was asked for, and told; nobody waits long for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.integrations.sglang.conftest import FakeRequest

from kvgraft.integrations.sglang.planning.substitutes import TreeSubstitutes
from kvgraft.reuse.substitute import Substitutes
from kvgraft.substitution import GuardedProvider, SemanticPrefixProvider, SemanticPrefixResult
from kvgraft.types import MissReason

MIN_GAIN = 16


class Recall(SemanticPrefixProvider):
    """Names the last prompt that was stored."""

    def __init__(self):
        self.stored, self.num_asked, self.heard = None, 0, []

    def on_prefix_miss(self, rid, token_ids):
        assert not token_ids.flags.writeable
        self.num_asked += 1
        if self.stored is None:
            return None
        return SemanticPrefixResult(self.stored.tolist(), 0, source_id="last", metadata={"similarity": 0.5})

    def on_request_cached(self, rid, token_ids):
        self.stored = token_ids
        self.heard.append(len(token_ids))


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
    substitutes = Substitutes(GuardedProvider(provider, deadline_s), MIN_GAIN)
    for part in (world.reuse.promises.decisions, world.reuse.publishing):
        part.substitutes = TreeSubstitutes(substitutes, world.tree, 1)
    return provider


def asking(rid, tokens, mode="substitute"):
    return FakeRequest(
        rid,
        tokens,
        sampling_params=SimpleNamespace(custom_params={"kvgraft": mode}, max_new_tokens=8, regex=None, ebnf=None),
    )


def test_a_stand_in_is_copied_and_called_substituted(make_world, make_tokens):
    world = make_world()
    attach(world, Recall())
    world.publish("stored", make_tokens(50))
    req = asking("query", make_tokens(40))
    assert world.reuse.promises.promise(req, req.origin_input_ids, 39, 0) == 39
    assert world.reuse.loading.load_first(req, 39) == 39
    assert req.skip_radix_cache_insert
    req.is_finished, req.owned = True, 40
    world.reuse.publishing.adopt_computed(req, None, None)
    assert world.reuse.publishing.adopted(req) == []
    world.reuse.ends.released(req)
    entry = world.log.take(req)
    attempt = entry["attempts"][0]
    assert (attempt["substituted_tokens"], attempt["shifted_tokens"]) == (39, 0)
    assert attempt["spans"][0]["fidelity"] == "substituted"
    assert entry["report"]["substitution"] == {"source_id": "last", "metadata": {"similarity": 0.5}}
    assert "another text" in entry["report"]["risk"]["reason"]
    world.conserved(private=39)


def test_an_exact_prefix_that_is_short_does_not_silence_it(make_world, make_tokens):
    world = make_world()
    attach(world, Recall())
    world.publish("stored", make_tokens(50))
    req = asking("query", make_tokens(40))
    assert world.reuse.promises.promise(req, req.origin_input_ids, 39, 10) == 29


@pytest.mark.parametrize("mode", [None, "graft", "exact", "off"])
def test_it_is_asked_only_by_requests_that_ask_for_it(make_world, make_tokens, mode):
    world = make_world()
    provider = attach(world, Recall())
    req = FakeRequest("query", make_tokens(40)) if mode is None else asking("query", make_tokens(40), mode)
    assert world.reuse.promises.promise(req, req.origin_input_ids, 39, 0) == 0
    assert provider.num_asked == 0


def test_it_is_not_asked_where_equal_text_leaves_little(make_world, make_tokens):
    world = make_world()
    provider = attach(world, Recall())
    stored = make_tokens(50)
    world.publish("stored", stored)
    req = asking("query", make_tokens(3) + stored[:40] + make_tokens(3))
    assert world.reuse.promises.promise(req, req.origin_input_ids, 45, 0) == 0
    assert provider.num_asked == 0


@pytest.mark.parametrize(("mode", "reason"), [("exact", MissReason.REUSE_OFF), ("words", MissReason.REUSE_OFF)])
def test_a_request_may_take_exact_prefixes_only(make_world, make_tokens, mode, reason):
    world = make_world()
    stored = make_tokens(50)
    world.publish("stored", stored)
    req = asking("query", make_tokens(3) + stored, mode)
    assert world.reuse.promises.promise(req, req.origin_input_ids, 52, 0) == 0
    world.reuse.ends.released(req)
    miss = world.reuse.books.requests[req].attempts[0].report.miss
    assert miss.reason is reason
    assert ("must be off, exact, graft, substitute" in miss.detail) is (mode == "words")


@pytest.mark.parametrize("provider", [Stuck, Broken])
def test_a_stuck_or_broken_provider_is_a_miss(make_world, make_tokens, provider):
    world = make_world()
    attach(world, provider(), deadline_s=0.05)
    for rid in ("first", "second"):
        req = asking(rid, make_tokens(40))
        assert world.reuse.promises.promise(req, req.origin_input_ids, 39, 0) == 0
    Stuck.release.set()


def test_short_texts_such_as_health_checks_are_not_told_of(make_world, make_tokens):
    world = make_world()
    provider = attach(world, Recall())
    world.publish("health", make_tokens(MIN_GAIN - 1))
    world.publish("text", make_tokens(50))
    assert (
        world.reuse.publishing.substitutes.provider.propose("query", np.zeros(60, np.int64), 0, 0) is not None
    )  # in order
    assert provider.heard == [50]
