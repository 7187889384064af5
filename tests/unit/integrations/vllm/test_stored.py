"""What a store beside us has of a prompt weighs against what a graft would reuse of it."""

from __future__ import annotations

import random

import pytest
from stand_ins import Engine, Request

from kvgraft.config import VLLMConfig
from kvgraft.integrations.vllm.scheduler import EngineFacts, GraftScheduler
from kvgraft.integrations.vllm.scheduler.private_hashes import is_tainted
from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED, StoredPrefix

DOCUMENT = random.Random(1).choices(range(1000), k=200)
PROMPT = [5000] * 20 + DOCUMENT + [7000] * 30
WORTH = 64


@pytest.fixture
def graft():
    """A scheduler's half that has one donor, of `DOCUMENT`."""
    config = VLLMConfig(selection="none", min_run=16, min_saved_tokens=WORTH, lookup_deadline_ms=1e9)
    made = GraftScheduler(config, EngineFacts("model", (48,), 48, 0, 4000, 64, 8, ""))
    engine = Engine(made)
    engine.fate = ""
    engine.add(Request("donor", DOCUMENT, {"kvgraft": "exact"}, 1))
    for _ in range(3):
        engine.step(room=True, chunk=400)
    assert len(made.registry.catalogue) == 1
    return made


@pytest.mark.parametrize(
    ("num_stored", "is_grafted"), [(0, True), (48, True), (136, True), (137, False), (200, False), (240, False)]
)
def test_a_graft_has_to_reuse_so_many_more_tokens(graft, num_stored, is_grafted):
    request = Request("asked", PROMPT, None, 1)
    claimed, _ = graft.match(request, 0, StoredPrefix(num_stored, asynchronous=True))
    assert (claimed > 0) == is_tainted(request) == is_grafted
    graft.admit(request, ([1, 2, 3, 4, 5, 6],), claimed)
    report = graft.finish(request)["kvgraft"]
    assert report["exact_tokens"] == (0 if is_grafted else num_stored)
    if not is_grafted:
        assert report["miss"] == {"reason": "not_worth_it", "detail": f"a store has {num_stored} exact tokens"}
    graft.check()


def test_it_is_decided_once_while_a_request_waits_for_room(graft, monkeypatch):
    request, stored = Request("asked", PROMPT, None, 1), StoredPrefix(144, asynchronous=True)
    assert graft.match(request, 0, stored) == (0, False)
    with monkeypatch.context() as patch:
        patch.setattr(graft._decisions, "decide", None)
        assert graft.match(request, 0, stored) == (0, False)
    claimed, _ = graft.match(request, 0, NOTHING_STORED)
    assert claimed, "the store has lost it since"
    graft.finish(request)
    graft.check()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_text_is_captured_where_its_load_cannot_fail_behind_it(graft, asynchronous):
    tokens = [3000 + number for number in range(150)]
    request = Request("asked", tokens, {"kvgraft": "exact"}, 1)
    graft.match(request, 0, StoredPrefix(96, asynchronous))
    assert bool(graft._attempts.running["asked"].held.texts) == asynchronous
    graft.finish(request)
    graft.check()
