"""Donors in stores: found after a restart, read while a request waits, and never waited for too long."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.integrations.sglang.conftest import INV_FREQ, FakeRequest
from tests.unit.integrations.sglang.shelf import Shelf

from kvgraft.donors import DonorQuery
from kvgraft.errors import StoreError
from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.integrations.sglang.stored import link, write_behind
from kvgraft.memory.store.record import DonorRecord
from kvgraft.types import MissReason

SOON = 60.0


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def server(make_world, shelf):
    """Return a function that makes another server with the same shelf."""
    return lambda *more, **settings: make_world(stores=(shelf, *more), **settings)


def settle(world):
    """Let everything be written that is to be, and be told of."""
    link = world.link
    while not link._behind.is_idle:
        link.tick(is_idle=True)
    assert all(opened.writer.flush(SOON) for opened in link._used)
    look(world)


def look(world):
    assert all(opened.feed.look(SOON) for opened in world.link._used)
    world.reuse.idle()
    world.keeper.check()


def outcomes(world, place=0):
    """Reads by what became of them."""
    return {name: count for name, count in world.link.counts()[place].reads.items() if count}


def promise(world, req, prefix_len=0):
    req.prefix_len = prefix_len
    return world.reuse.promises.promise(req, req.origin_input_ids, len(req.origin_input_ids) - 1, prefix_len)


def awaits(world, req):
    return world.reuse.promises.awaits(req, may_nap=False)


def arrive(world, req):
    for span in world.reuse.books.requests[req].reads.spans:
        assert span.read.wait(SOON)


def ask(world, document, make_tokens, rid="query", **names):
    """A request for `document` behind ten other tokens; returns it and what is promised at the document."""
    req = FakeRequest(rid, make_tokens(10) + document + make_tokens(5), **names)
    promise(world, req, 10)
    if awaits(world, req):
        arrive(world, req)
    return req, promise(world, req, 10)


def report(world, req):
    req.is_finished = True
    world.reuse.ends.released(req)
    return world.log.take(req)["attempts"][-1]


def rotated(keys, delta):
    angle = INV_FREQ.double() * delta
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_text_of_a_server_that_is_gone_is_copied_by_the_next(server, make_tokens):
    before, document = server(), make_tokens(300)
    node = before.publish("donor", document)
    kept = [
        (k[before.tree.slots(node)].clone(), v[before.tree.slots(node)].clone())
        for k, v in zip(before.keys, before.values, strict=True)
    ]
    settle(before)
    after = server()
    for buffer in (*after.keys, *after.values):
        buffer.zero_()
    look(after)
    req = FakeRequest("query", make_tokens(10) + document + make_tokens(5))
    assert promise(after, req, 10) == 0
    assert awaits(after, req)
    arrive(after, req)
    assert promise(after, req, 10) == 300
    assert not awaits(after, req)
    assert after.reuse.loading.load_first(req, 300) == 300
    (slots,) = after.reuse.loading.private_slots(req)
    for layer, (keys, values) in enumerate(kept):
        assert torch.equal(after.values[layer][slots], values)
        assert torch.allclose(after.keys[layer][slots], rotated(keys, 10), atol=1e-5)
    assert report(after, req)["sources"][0]["request"] == "a store"
    assert outcomes(after) == {"hit": 1}
    assert after.log.num_errors == 0
    after.keeper.check()
    after.conserved(private=300)


def test_text_that_was_read_is_at_hand_for_the_next_request(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    assert ask(after, document, make_tokens)[1] == 100
    assert shelf.touched.wait(SOON), "a store may evict what nobody uses"
    req = FakeRequest("second", make_tokens(10) + document + make_tokens(5))
    assert promise(after, req, 10) == 100, "no waiting"
    assert shelf.num_reads == 1


def test_requests_that_wait_for_the_same_text_share_a_read(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    shelf.gate.clear()
    reqs = [FakeRequest(f"query {n}", make_tokens(10) + document + make_tokens(5)) for n in range(3)]
    assert [promise(after, req, 10) for req in reqs] == [0, 0, 0]
    shelf.gate.set()
    for req in reqs:
        arrive(after, req)
        assert promise(after, req, 10) == 100
    assert shelf.num_reads == 1
    after.keeper.check()


@pytest.mark.parametrize("goes", [0, 1])
def test_request_that_goes_away_leaves_a_read_to_those_that_share_it(server, shelf, make_tokens, goes):
    before, document, fillers = server(), make_tokens(100), [make_tokens(100) for _ in range(2)]
    for number, text in enumerate([document, *fillers]):
        before.publish(f"donor {number}", text)
    settle(before)
    after = server()
    look(after)
    shelf.gate.clear()
    for text in fillers:  # all threads of the reader are held up, and reads of the document wait behind them
        assert promise(after, FakeRequest("filler", make_tokens(10) + text + make_tokens(5)), 10) == 0
    reqs = [FakeRequest(f"query {n}", make_tokens(10) + document + make_tokens(5)) for n in range(2)]
    assert [promise(after, req, 10) for req in reqs] == [0, 0]
    (span,) = after.reuse.books.requests[reqs[0]].reads.spans
    after.reuse.ends.aborted(reqs[goes].cache_request_handle)
    assert not span.read.is_cancelled
    shelf.gate.set()
    stays = reqs[1 - goes]
    arrive(after, stays)
    assert promise(after, stays, 10) == 100


def test_parts_at_hand_and_parts_in_the_store_are_put_together(server, make_tokens):
    before, after, document = server(), server(), make_tokens(200)
    after.publish("half", document[:120])
    before.publish("donor", document)
    settle(before)
    look(after)
    _, promised = ask(after, document, make_tokens)
    assert promised == 200
    assert after.link.counts()[0].read_bytes == 80 * after.pool.bytes_per_token


def test_other_weights_find_nothing(server, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server(weights="trained on")
    look(after)
    assert not after.link.num_stored
    assert ask(after, document, make_tokens)[1] == 0
    again = server()
    look(again)
    assert again.link.num_stored == 1


@pytest.mark.parametrize("part", ["body", "head"])
def test_damaged_object_is_a_miss_and_goes(server, shelf, make_tokens, part):
    before, document = server(), make_tokens(300)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    ((name, (head, body)),) = shelf.objects.items()
    if part == "body":
        body[len(body) // 2] ^= 1
    else:
        shelf.objects[name] = (head[:-1] + bytes([head[-1] ^ 1]), body)
    req, promised = ask(after, document, make_tokens)
    assert promised == 0
    assert not awaits(after, req)
    assert not shelf.objects
    assert outcomes(after) == {"corrupt": 1}
    look(after)
    assert not after.link.num_stored
    assert report(after, req)["miss"]["reason"] == MissReason.STORE


def test_object_that_is_gone_is_a_miss(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    shelf.objects.clear()
    req, promised = ask(after, document, make_tokens)
    assert promised == 0
    assert outcomes(after) == {"missing": 1}
    assert report(after, req)["miss"]["reason"] == MissReason.STORE, "the store had it, and has lost it"


def test_store_that_hangs_costs_a_deadline_and_is_left_alone(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    shelf.gate.clear()
    req = FakeRequest("query", make_tokens(10) + document + make_tokens(5))
    assert promise(after, req, 10) == 0
    after.now += 0.4
    assert promise(after, req, 10) == 0
    assert awaits(after, req)
    after.now += 0.2
    assert promise(after, req, 10) == 0
    assert not awaits(after, req), "it is computed now"
    assert report(after, req)["miss"]["reason"] == MissReason.STORE
    assert outcomes(after)["late"] == 1
    second = FakeRequest("second", make_tokens(10) + document + make_tokens(5))
    assert promise(after, second, 10) == 0
    assert not awaits(after, second), "the store rests"
    shelf.gate.set()
    after.now += 2
    assert ask(after, document, make_tokens, "third")[1] == 100
    assert after.log.num_errors == 0


def test_store_that_raises_harms_nobody(server, shelf, make_tokens):
    world, document = server(), make_tokens(100)
    shelf.trouble = "no route to host"
    world.publish("donor", document)
    with pytest.raises(StoreError, match="no route to host"):
        settle(world)
    assert ask(world, document, make_tokens)[1] == 100, "at hand all the same"
    world.reuse.books.clear()
    assert ask(world, document, make_tokens, "second")[1] == 0
    shelf.trouble = None
    world.publish("donor", document)
    settle(world)
    after = server()
    look(after)
    shelf.trouble = "no route to host"
    req, promised = ask(after, document, make_tokens)
    assert promised == 0
    assert not awaits(after, req)
    assert outcomes(after) == {"failed": 1}
    assert after.link.num_stored == 1, "it may come back"
    assert after.log.num_errors == world.log.num_errors == 0


def test_read_that_takes_longer_than_computing_is_not_begun(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    after.link.prefill.observe(1000, 1000.0, 1e-6)
    req, promised = ask(after, document, make_tokens)
    assert (promised, shelf.num_reads) == (0, 0)
    assert report(after, req)["miss"]["reason"] == MissReason.NOT_WORTH_IT
    for _ in range(9):
        after.link.prefill.observe(1000, 1000.0, 1e3)
    assert ask(after, document, make_tokens, "second")[1] == 100


def test_prefills_tell_how_long_computing_takes(server, make_tokens):
    world = server()
    assert world.link.prefill.per_s is None
    tokens = make_tokens(200)
    req = FakeRequest("query", tokens)
    promise(world, req)
    world.now += 2.0
    req.kv.cache_protected_len = 200
    world.reuse.publishing.published(req, world.tree.insert(tokens, world.tree.allocate(200)))
    cost = world.link.costs.compute_cost(0, 200)
    assert cost / world.link.prefill.per_s == pytest.approx(2.0)
    world.now += 50
    req.is_finished = True
    world.reuse.publishing.published(req, None)
    assert cost / world.link.prefill.per_s == pytest.approx(2.0), "decoding is no prefill"


def test_large_text_is_copied_piece_by_piece(server, shelf, make_tokens, monkeypatch):
    monkeypatch.setattr(write_behind, "PIECE_BYTES", 50 * 256)
    world, document = server(), make_tokens(300)
    assert world.pool.bytes_per_token == 256
    node = world.publish("donor", document)
    behind, pieces = world.link._behind, []
    begin = world.pool.begin_export
    world.pool.begin_export = lambda slots: pieces.append(len(slots)) or begin(slots)
    while not behind.is_idle:
        behind.work(1)
        assert not world.tree.pins, "nothing is held between pieces"
    assert pieces == [50] * 6
    assert world.link._used[0].writer.flush(SOON)
    ((_, (_, body)),) = shelf.objects.items()
    rows = torch.from_numpy(np.frombuffer(body, np.float32).copy()).view(300, 4, 2, 8)
    slots = world.tree.slots(node)
    assert torch.equal(rows[:, 0], world.keys[0][slots])
    assert torch.equal(rows[:, 3], world.values[1][slots])


def test_text_that_is_evicted_while_it_is_copied_is_stored_from_host_memory(server, shelf, make_tokens, monkeypatch):
    monkeypatch.setattr(write_behind, "PIECE_BYTES", 50 * 256)
    world, document = server(), make_tokens(300)
    node = world.publish("donor", document)
    world.link._behind.work(2)
    world.tree.evict(node, 0)
    settle(world)
    after = server()
    look(after)
    assert ask(after, document, make_tokens)[1] == 300
    assert len(shelf.objects) == 1


def test_text_that_others_have_stored_is_not_stored_again(server, shelf, make_tokens):
    world, document = server(), make_tokens(300)
    world.publish("donor", document)
    settle(world)
    other = server()
    look(other)
    other.publish("part", document[:200])
    other.publish("more", document + make_tokens(100))
    settle(other)
    assert len(shelf.objects) == 2
    world.reuse.books.clear()
    assert ask(world, document, make_tokens)[1] == 300, "the space is opened again, with all that is in it"


def test_exact_text_replaces_a_stored_donor_for_good(server, make_tokens):
    """The approximate one does not come back from the store that still holds it."""
    world, document = server(), make_tokens(100)
    namespace = request_namespace("model", None, None, None)
    approximate = DonorRecord(namespace.key, np.array(document, np.int32), 1, 5)
    assert world.keeper.stored.join(approximate, 0)
    world.publish("donor", document)
    assert [donor.generation for donor in world.keeper.catalogue] == [0]
    assert world.keeper.stored.recall(is_urgent=True) == []


def test_text_that_leaves_memory_is_read_again(server, shelf, make_tokens):
    world, document = server(host_bytes=0), make_tokens(100)
    node = world.publish("donor", document)
    settle(world)
    assert world.link.num_stored == 0
    world.tree.evict(node, 40)
    assert world.keeper.find(
        DonorQuery(request_namespace("model", None, None, None), np.array(document), with_stored=False)
    )
    world.keeper.check()
    assert sorted(donor.num_tokens for donor in world.keeper.catalogue) == [40, 100]
    assert world.link.num_stored == 1, "a store holds it"


def test_tenants_and_adapters_are_kept_apart(server, shelf, make_tokens):
    before, document, adapted = server(), make_tokens(100), make_tokens(100)
    before.publish("donor", document, cache_salt="one")
    req = FakeRequest("adapted", adapted, lora_id="adapter")
    promise(before, req)
    req.kv.cache_protected_len, req.is_finished = 100, True
    before.reuse.publishing.published(req, before.tree.insert(adapted, before.tree.allocate(100)))
    settle(before)
    assert len(before.keeper) == 2
    assert len(shelf.objects) == 1, "an adapter's name may come to mean other weights"
    assert not any(b"one" in head for head, _ in shelf.objects.values())
    after = server()
    look(after)
    assert ask(after, document, make_tokens, "other tenant", cache_salt="two")[1] == 0
    assert ask(after, document, make_tokens, "nobody")[1] == 0
    assert ask(after, document, make_tokens, "its adapter", cache_salt="one", lora_id="adapter")[1] == 0
    assert ask(after, document, make_tokens, "the same", cache_salt="one")[1] == 100


def test_weights_that_change_take_the_space_with_them(server, shelf, make_tokens):
    world, document = server(), make_tokens(100)
    world.publish("donor", document)
    settle(world)
    first = set(shelf.spaces)
    world.reuse.books.weights_change()
    world.weights = "trained on"
    assert ask(world, document, make_tokens, "stale")[1] == 0
    assert not world.link.is_open
    world.reuse.books.clear()
    assert ask(world, document, make_tokens, "new")[1] == 0
    look(world)
    assert not world.link.num_stored
    assert ask(world, document, make_tokens, "later")[1] == 0
    world.publish("again", document)
    settle(world)
    assert len(shelf.spaces - first) == 1
    world.reuse.books.weights_change()
    world.weights = "of today"
    world.reuse.books.clear()
    ask(world, make_tokens(20), make_tokens, "opens")
    look(world)
    assert ask(world, document, make_tokens, "back")[1] == 100, "the weights of then are back, and their K/V"


def test_read_that_began_under_other_weights_is_thrown_away(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    shelf.gate.clear()
    req = FakeRequest("query", make_tokens(10) + document + make_tokens(5))
    promise(after, req, 10)
    after.reuse.books.weights_change()
    after.weights = "trained on"
    after.reuse.books.clear()
    shelf.gate.set()
    assert promise(after, req, 10) == 0
    assert not awaits(after, req)
    assert not len(after.keeper)


def test_nothing_is_stored_while_weights_change_unseen(server, shelf, make_tokens):
    world, document = server(), make_tokens(100)
    world.reuse.books.weights_change(is_between=True)
    world.reuse.books.weights_change()
    world.reuse.books.clear()  # each part flushes
    world.publish("between", document)
    world.reuse.idle()
    assert not world.link.is_open
    assert not shelf.objects
    assert ask(world, document, make_tokens)[1] == 100, "at hand, for SGLang serves with these weights, too"
    world.reuse.books.weights_change(is_between=False)
    world.weights = "trained on"
    world.reuse.books.clear()
    world.publish("through", document)
    settle(world)
    assert len(shelf.objects) == 1


def test_request_that_goes_away_takes_its_reads_along(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    shelf.gate.clear()
    req = FakeRequest("query", make_tokens(10) + document + make_tokens(5))
    promise(after, req, 10)
    (span,) = after.reuse.books.requests[req].reads.spans
    after.reuse.ends.aborted(req.cache_request_handle)
    assert span.read.is_cancelled
    assert after.reuse.books.num_requests == 0
    shelf.gate.set()


def test_more_than_host_memory_holds_is_not_read(server, shelf, make_tokens):
    before, document = server(), make_tokens(300)
    before.publish("donor", document)
    settle(before)
    after = server(host_bytes=299 * 256)
    look(after)
    assert ask(after, document, make_tokens)[1] == 0
    assert shelf.num_reads == 0


def test_second_store_has_what_the_first_has_lost(server, shelf, make_tokens):
    second, document = Shelf(), make_tokens(100)
    before = server(second)
    before.publish("donor", document)
    settle(before)
    assert len(shelf.objects) == len(second.objects) == 1
    shelf.objects.clear()
    after = server(second)
    look(after)
    assert ask(after, document, make_tokens)[1] == 100
    assert (shelf.num_reads, second.num_reads) == (0, 1)


@pytest.mark.parametrize(("budget_s", "listed"), [(1e9, 200), (0.0, 64)])
def test_idle_scheduler_lists_what_is_new_for_a_while(server, make_tokens, monkeypatch, budget_s, listed):
    before = server()
    for number in range(200):
        before.publish(f"donor {number}", make_tokens(20))
        before.tree.evict(next(reversed(before.tree.paths)), 0)
    settle(before)
    monkeypatch.setattr(link, "_IDLE_S", budget_s)
    after = server()
    assert all(opened.feed.look(SOON) for opened in after.link._used)
    after.reuse.idle()
    assert after.link.num_stored == listed


def test_what_stores_have_done_is_shown_and_outlives_a_space(server, shelf, make_tokens):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    assert before.log.metrics["store_writes", shelf.name, "stored"] == 1
    before.reuse.books.clear()
    assert before.link.counts()[0].writes["stored"] == 1
    ask(before, make_tokens(20), make_tokens, "opens")
    look(before)
    req, promised = ask(before, document, make_tokens)
    assert promised == 100
    before.now += 2.0
    before.reuse.idle()
    metrics = before.log.metrics
    assert metrics["store_writes", shelf.name, "stored"] == metrics["store_reads", shelf.name, "hit"] == 1
    assert metrics["store_cold_donors"] == 0, "it was read and is resident"
    assert "read" in report(before, req)["timings_ms"]


@pytest.mark.parametrize(("compute_s", "patience_s"), [(0.1, 0.1), (1.0, 0.5), (8.0, 2.0), (100.0, 5.0), (None, 0.5)])
def test_longer_computing_is_worth_more_patience(server, shelf, make_tokens, compute_s, patience_s):
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    after = server()
    look(after)
    if compute_s is not None:
        cost = after.link.costs.saving(10, 110)
        after.link.prefill.observe(100, cost, compute_s)
    shelf.gate.clear()
    req = FakeRequest("query", make_tokens(10) + document + make_tokens(5))
    promise(after, req, 10)
    assert after.reuse.books.requests[req].reads.deadline - after.now == pytest.approx(patience_s)
    shelf.gate.set()


def test_scheduler_that_is_never_idle_keeps_up_with_writing(server, make_tokens, monkeypatch):
    monkeypatch.setattr(write_behind, "PIECE_BYTES", 50 * 256)
    world = server()
    for number in range(4):
        world.publish(f"donor {number}", make_tokens(200))
    promise(world, FakeRequest("last", make_tokens(200)))
    assert world.link._behind.is_idle
    world.publish("donor", make_tokens(200))
    promise(world, FakeRequest("short", make_tokens(20)))
    assert not world.link._behind.is_idle, "a short request is not held up for a long text"


def raises(*_):
    raise MemoryError("no memory")


def is_given_up(world):
    return not world.link.is_open and world.log.num_errors == 1


def comes_back(world, document, make_tokens):
    """Whether a flush makes a server that has given its stores up use them again."""
    world.reuse.books.clear()
    promise(world, FakeRequest("opens", make_tokens(20)))
    look(world)
    return ask(world, document, make_tokens, "later")[1] == len(document)


@pytest.fixture
def stored(server, make_tokens):
    """A text that a store has."""
    before, document = server(), make_tokens(100)
    before.publish("donor", document)
    settle(before)
    return document


@pytest.mark.parametrize("is_idle", [False, True])
def test_failure_to_write_ends_the_use_of_stores(server, stored, make_tokens, monkeypatch, is_idle):
    world, document = server(), make_tokens(100)
    world.publish("donor", document)
    with monkeypatch.context() as patch:
        patch.setattr(world.keeper, "export", raises)
        if is_idle:
            world.reuse.idle()
        else:
            promise(world, FakeRequest("query", make_tokens(20)))
    assert is_given_up(world)
    world.reuse.idle()
    assert ask(world, document, make_tokens)[1] == 100, "what is at hand is of use all the same"
    assert world.log.num_errors == 1
    assert comes_back(world, stored, make_tokens)


def test_weights_that_cannot_be_read_open_no_store(server, stored, make_tokens, monkeypatch):
    world, document = server(), make_tokens(100)
    world.reuse.books.weights_change()
    world.reuse.books.clear()
    with monkeypatch.context() as patch:
        patch.setattr(world.link, "_weights", raises)
        world.publish("donor", document)
    assert is_given_up(world)
    assert ask(world, document, make_tokens)[1] == 100
    assert comes_back(world, stored, make_tokens)


def test_what_was_read_and_cannot_be_kept_is_computed(server, stored, make_tokens, monkeypatch):
    world = server()
    look(world)
    with monkeypatch.context() as patch:
        patch.setattr(world.keeper, "keep", raises)
        req, promised = ask(world, stored, make_tokens)
    assert (promised, awaits(world, req)) == (0, False)
    assert report(world, req)["miss"]["reason"] == MissReason.ERROR
    assert is_given_up(world)
    assert comes_back(world, stored, make_tokens)


def test_read_that_cannot_begin_is_computed(server, stored, make_tokens, monkeypatch):
    world = server()
    look(world)
    with monkeypatch.context() as patch:
        patch.setattr(world.link._used[0].reader, "fetch", raises)
        req, promised = ask(world, stored, make_tokens)
    assert (promised, awaits(world, req)) == (0, False)
    assert report(world, req)["miss"]["reason"] == MissReason.ERROR
    assert is_given_up(world)
    assert comes_back(world, stored, make_tokens)


def test_news_that_cannot_be_listed_end_the_use_of_stores(server, stored, make_tokens, monkeypatch):
    world = server()
    with monkeypatch.context() as patch:
        patch.setattr(world.link._used[0], "news", raises)
        world.reuse.idle()
    assert is_given_up(world)
    assert comes_back(world, stored, make_tokens)
