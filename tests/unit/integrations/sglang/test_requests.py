"""A request's way through reuse, on fakes: what is promised, copied, kept, given back and reported."""

from __future__ import annotations

import json

import pytest
import torch
from tests.unit.integrations.sglang.conftest import INV_FREQ, FakeRequest

from kvgraft.donors import DonorQuery
from kvgraft.errors import PolicyError, StoreError
from kvgraft.graft.select import FirstK, looks_at_query
from kvgraft.integrations.sglang.donors import keeper
from kvgraft.memory import HostKVStore
from kvgraft.types import MissReason


def rotated(keys, delta):
    angle = INV_FREQ.double() * delta
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def promise(world, req, prefix_len=0):
    req.prefix_len = prefix_len
    return world.reuse.promises.promise(req, req.origin_input_ids, len(req.origin_input_ids) - 1, prefix_len)


def report(world, req):
    req.is_finished = True
    world.reuse.ends.released(req)
    return world.log.take(req)["attempts"][-1]


def test_region_is_copied_with_keys_rotated_to_its_new_position(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    node = world.publish("donor", make_tokens(30) + document)
    req = FakeRequest("query", document[20:80] + make_tokens(20))
    assert promise(world, req) == 60
    assert world.reuse.loading.load_first(req, 60) == 60
    (slots,) = world.reuse.loading.private_slots(req)
    source = world.tree.slots(node)[50:110]
    for keys, values in zip(world.keys, world.values, strict=True):
        torch.testing.assert_close(keys[slots], rotated(keys[source], -50), atol=1e-5, rtol=0)
        assert torch.equal(values[slots], values[source])
    assert req.skip_radix_cache_insert
    world.conserved(private=60)


def test_promise_repeats_without_planning_again(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    assert promise(world, req) == promise(world, req) == 80
    assert world.reuse.promises.promised(req, 0) == 80
    assert world.reuse.promises.promised(req, 1) == 0
    world.conserved()


def test_donor_that_appears_while_a_request_waits_is_used(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    assert promise(world, req) == 0
    world.publish("donor", document)
    assert promise(world, req) == 80


def test_waiting_prompt_is_looked_up_once_and_again_when_its_turn_comes(make_world, make_tokens):
    """However many rounds it waits, and whatever becomes a donor meanwhile."""
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req, lookups, plan = FakeRequest("query", document + make_tokens(5)), [], world.planner.plan
    world.planner.plan = lambda *args, **fields: lookups.append(1) or plan(*args, **fields)
    tokens = req.origin_input_ids
    for number in range(5):
        assert world.reuse.promises.promise(req, tokens, len(tokens) - 1, 0, may_keep=True) == 100
        world.keeper.version += 1  # another text has become a donor
        assert len(lookups) == 1, number
    assert world.reuse.promises.promise_again(req) == 100
    assert world.reuse.promises.promise_again(req) is None
    assert len(lookups) == 2


def test_what_has_become_a_donor_while_a_prompt_waited_is_found_when_its_turn_comes(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    req = FakeRequest("query", document + make_tokens(5))
    tokens = req.origin_input_ids
    assert world.reuse.promises.promise(req, tokens, len(tokens) - 1, 0, may_keep=True) == 0
    world.publish("donor", document)
    assert world.reuse.promises.promise(req, tokens, len(tokens) - 1, 0, may_keep=True) == 0
    assert world.reuse.promises.promise_again(req) == 100
    world.reuse.books.clear()  # as after a flush
    assert world.reuse.promises.promise(req, tokens, len(tokens) - 1, 0, may_keep=True) == 0
    assert world.reuse.promises.promise_again(req) == 0


def test_exact_prefix_that_has_grown_while_a_prompt_waited_promises_nothing_of_before(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document + make_tokens(5))
    tokens = req.origin_input_ids
    assert world.reuse.promises.promise(req, tokens, len(tokens) - 1, 0, may_keep=True) == 100
    assert world.reuse.promises.promise(req, tokens, len(tokens) - 1, 50, may_keep=True) == 0
    assert world.reuse.promises.promise_again(req) == 50


def test_donor_evicted_after_the_promise_is_computed_instead(make_world, make_tokens):
    world, document = make_world(host_bytes=0), make_tokens(100)
    node = world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    promised = promise(world, req)
    world.tree.evict(node, 40)
    assert world.reuse.loading.load_first(req, promised) == 0
    assert not req.skip_radix_cache_insert
    assert report(world, req)["miss"]["detail"] == "the donor was evicted before it could be copied"
    world.conserved()


def test_donor_shortened_before_the_lookup_is_used_as_far_as_it_goes(make_world, make_tokens):
    world, document = make_world(host_bytes=0), make_tokens(100)
    node = world.publish("donor", document)
    world.tree.evict(node, 50)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    assert promise(world, req) == 40
    world.keeper.check()


def test_evicted_donor_is_copied_from_host_memory(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    node = world.publish("donor", make_tokens(30) + document)
    source = world.tree.slots(node)[40:120]
    keys, values = world.keys[1][source].clone(), world.values[1][source].clone()
    world.tree.evict(node, 0)
    for buffer in (*world.keys, *world.values):
        buffer.zero_()
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    assert world.reuse.loading.load_first(req, promise(world, req)) == 80
    (slots,) = world.reuse.loading.private_slots(req)
    torch.testing.assert_close(world.keys[1][slots], rotated(keys, -40), atol=1e-5, rtol=0)
    assert torch.equal(world.values[1][slots], values)
    found = report(world, req)
    assert found["sources"] == [{"request": "donor", "attempt": 0, "position": 40, "tier": "host"}]
    world.keeper.check()


def test_donor_that_half_evicted_comes_from_both_tiers(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    node = world.publish("donor", document)
    world.tree.evict(node, 50)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    assert world.reuse.loading.load_first(req, promise(world, req)) == 80
    assert [source["tier"] for source in report(world, req)["sources"]] == ["device", "host"]


def test_host_memory_keeps_within_its_budget_and_drops_the_oldest(make_world, make_tokens):
    per_token = 2 * 2 * 2 * 8 * 4
    world = make_world(host_bytes=100 * per_token)
    texts = [make_tokens(60) for _ in range(3)]
    for number, text in enumerate(texts):
        world.tree.evict(world.publish(f"donor {number}", text), 0)
        world.keeper.check()
    assert world.keeper.host_bytes == 60 * per_token
    assert promise(world, FakeRequest("old", texts[0] + make_tokens(5))) == 0
    assert promise(world, FakeRequest("new", texts[2] + make_tokens(5))) == 60


class FullStore(HostKVStore):
    def put(self, key, block):
        raise StoreError("no space left")


def test_text_that_the_store_does_not_keep_leaves_without_harm(make_world, make_tokens, monkeypatch):
    monkeypatch.setattr(keeper, "HostKVStore", FullStore)
    world, first, second = make_world(donor_tokens=150), make_tokens(100), make_tokens(100)
    world.tree.on_evicted = world.reuse.publishing.evicted
    world.tree.evict(world.publish("first", first), 0)
    assert world.keeper.host_bytes == 0
    world.publish("second", second)  # there is no room for both in the catalogue
    assert world.log.metrics["graft_errors"] == 1, "the one of the store"
    world.keeper.check()
    assert promise(world, FakeRequest("old", first + make_tokens(5))) == 0
    assert promise(world, FakeRequest("new", second[1:] + make_tokens(5))) == 99


@pytest.mark.parametrize("fails", ["export", "in_slots", "forget"])
def test_slots_of_text_that_could_not_be_kept_are_the_next_texts(make_world, make_tokens, monkeypatch, fails):
    """Else what a request computes there that publishes nothing, as of a session, is kept as K/V of the text before."""
    world, first, second = make_world(), make_tokens(100), make_tokens(100)
    node = world.publish("donor", first)
    slots = world.tree.slots(node)
    monkeypatch.setattr(world.pool if fails == "export" else world.keeper._slot_texts, fails, lambda _: 1 / 0)
    world.tree.evict(node, 0)
    assert (world.log.num_errors, len(world.keeper)) == (1, 0 if fails == "export" else 1)
    world.keeper.check()
    monkeypatch.undo()
    world.tree.free_slots = [slot for slot in world.tree.free_slots if slot not in slots.tolist()]
    world.tree.evict(world.tree.insert(second, slots), 0)
    assert world.keeper.host_bytes == 0
    assert promise(world, FakeRequest("query", first + make_tokens(5))) == 0


def test_text_whose_registration_broke_off_has_no_block_of_another(make_world, make_tokens, monkeypatch):
    """The catalogue has it by the time that what watches the catalogue fails."""
    world, first, second = make_world(), make_tokens(100), make_tokens(100)
    nodes = [world.publish("first", first), world.publish("second", second)]
    added = world.keeper.stored.donor_added
    monkeypatch.setattr(world.keeper.stored, "donor_added", lambda *_: 1 / 0)
    world.tree.evict(nodes[0], 0)
    monkeypatch.setattr(world.keeper.stored, "donor_added", added)
    world.tree.evict(nodes[1], 0)
    assert world.log.num_errors == 1
    assert promise(world, FakeRequest("old", first + make_tokens(5))) == 0
    assert promise(world, FakeRequest("new", second + make_tokens(5))) == 100


def test_further_regions_are_loaded_between_chunks(make_world, make_tokens):
    world, document = make_world(), make_tokens(200)
    world.publish("donor", document)
    req = FakeRequest("query", make_tokens(20) + document[:60] + make_tokens(30) + document[100:150] + make_tokens(9))
    assert promise(world, req) == 0
    assert world.reuse.loading.next_gap(req, 0) == 20
    req.prefix_len = 20
    assert len(world.reuse.loading.load_next(req, room=500)) == 60
    req.prefix_len = 80
    assert world.reuse.loading.next_gap(req, 80) == 30
    req.prefix_len = 110
    assert len(world.reuse.loading.load_next(req, room=500)) == 50
    assert world.reuse.loading.next_gap(req, 160) is None
    found = report(world, req)
    assert (found["shifted_tokens"], found["computed_tokens"], found["prefill_steps"]) == (110, 59, 3)


def test_region_that_running_requests_have_no_room_for_is_computed(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", make_tokens(20) + document[:60] + make_tokens(9))
    promise(world, req)
    req.prefix_len = 20
    assert world.reuse.loading.load_next(req, room=59) is None
    assert world.reuse.loading.next_gap(req, 20) is None
    assert report(world, req)["miss"]["reason"] == MissReason.NO_ROOM.value
    world.conserved()


def test_chunk_that_ended_inside_a_region_leaves_its_rest(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", make_tokens(20) + document[:60] + make_tokens(9))
    promise(world, req)
    req.prefix_len = 40
    assert len(world.reuse.loading.load_next(req, room=500)) == 40
    assert report(world, req)["spans"][0]["target_start"] == 40


def test_full_pool_is_a_miss_and_gives_everything_back(make_world, make_tokens):
    world, document = make_world(host_bytes=0), make_tokens(600)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:590] + make_tokens(10))
    promised = promise(world, req)
    assert promised == 580
    assert world.reuse.loading.load_first(req, promised) == 0  # 580 more do not fit beside the donor, which is pinned
    assert report(world, req)["miss"]["reason"] == MissReason.NO_ROOM.value
    world.conserved()


def test_failing_copy_is_counted_and_gives_everything_back(make_world, make_tokens, monkeypatch, caplog):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    promised = promise(world, req)
    monkeypatch.setattr(type(world.pool), "copy", lambda *_: 1 / 0)
    assert world.reuse.loading.load_first(req, promised) == 0
    assert world.log.num_errors == 1
    assert "division by zero" in caplog.text
    assert report(world, req)["miss"]["reason"] == MissReason.ERROR.value
    world.conserved()


def test_copy_whose_slots_cannot_be_read_leaves_no_donor_pinned(make_world, make_tokens, monkeypatch):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    promised = promise(world, req)
    monkeypatch.setattr(world.tree, "slots", lambda _: 1 / 0)
    assert world.reuse.loading.load_first(req, promised) == 0
    assert report(world, req)["miss"]["reason"] == MissReason.ERROR.value
    world.conserved()


def test_failing_lookup_is_a_miss(make_world, make_tokens, monkeypatch):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    monkeypatch.setattr(type(world.keeper), "find", lambda *_: 1 / 0)
    req = FakeRequest("query", document + make_tokens(10))
    assert promise(world, req) == 0
    assert report(world, req)["miss"]["reason"] == MissReason.ERROR.value


class Blind(FirstK):
    """Cannot say what it observes."""

    @property
    def observes(self):
        raise ValueError("no observables")


class FailingRecomputer:
    """Stands in for one whose policy fails when it is asked, or when it says what it costs or observes."""

    def __init__(self, where):
        self.where, self.starts = where, []

    def agreed_policy(self, num_reused, tail):
        if self.where == "ratio":
            raise PolicyError("selection policy broken: no ratio")
        policy = Blind(4) if self.where == "look" else FirstK(4)
        return policy, looks_at_query(policy)

    def in_step(self, act, failed):
        return act()

    def run(self, token_ids, plan, slots, policy):
        raise PolicyError("selection policy broken: no step")

    def run_all(self, token_ids, slots, start):
        if self.where == "pass":
            raise RuntimeError("no memory")
        self.starts.append((start, len(slots)))


@pytest.mark.parametrize("where", ["ratio", "look", "steps", "pass"])
def test_failing_policy_has_everything_computed_and_nothing_more_copied(make_world, make_tokens, where):
    world, document = make_world(selection="none", repair="before"), make_tokens(200)
    world.publish("donor", document)
    head = make_tokens(40)
    req = FakeRequest("query", document[10:90] + head + document[100:190] + make_tokens(10))
    promised = promise(world, req)
    assert promised == 80
    world.reuse.loading.load_first(req, promised)
    world.reuse.repairs.passes.recomputer = made = FailingRecomputer(where)
    world.reuse.repairs.recompute(req, torch.arange(80))
    assert world.reuse.loading.next_gap(req, 80) is None
    state = world.reuse.books.requests[req]
    assert state.lineage.is_approximate is (where == "pass")
    assert req.skip_radix_cache_insert
    assert made.starts == ([] if where == "pass" else [(0, 80)])
    assert world.log.num_errors == (2 if where == "pass" else 1)
    told = report(world, req)
    if where == "pass":
        assert told["policy"] == "none", "nothing was chosen"
    else:
        assert told["miss"]["reason"] == MissReason.POLICY_ERROR.value
    # Where nothing could be computed over copies, the report says so, and none of it passes for exact.
    assert told["shifted_tokens"] == sum(span["length"] for span in told["spans"]) == (80 if where == "pass" else 0)
    assert told["recomputed_tokens"] == 0
    # Passes are told apart from copies, as in vLLM; a policy that cannot be asked runs none.
    assert ("recompute" in told["timings_ms"]) is (where in ("steps", "pass"))


def test_aborted_and_retracted_requests_leave_nothing_behind(make_world, make_tokens, tmp_path):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    for rid, end in (
        ("a", lambda req: world.reuse.ends.aborted(req.cache_request_handle)),
        ("b", world.reuse.ends.released),
    ):
        req = FakeRequest(rid, document[10:90] + make_tokens(10))
        promise(world, req)
        end(req)
    promise(world, req)
    req.is_finished = True
    world.reuse.ends.released(req)
    assert world.reuse.books.num_requests == 0
    lines = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert [(line["request_id"], line["outcome"], len(line["attempts"])) for line in lines] == [
        ("donor", "finished", 1),
        ("a", "aborted", 1),
        ("b", "finished", 2),
    ]


def test_request_that_is_aborted_while_it_answers_did_not_finish(make_world, make_tokens, tmp_path):
    """SGLang lets it go like one that has its whole answer."""
    world, document = make_world(), make_tokens(100)
    req = FakeRequest("query", document, output_ids=make_tokens(3))
    promise(world, req)
    req.is_finished, req.finished_reason = True, type("FINISH_ABORT", (), {})()
    world.reuse.ends.released(req)
    (line,) = (tmp_path / "reports.jsonl").read_text().splitlines()
    assert (json.loads(line)["outcome"], json.loads(line)["output_tokens"]) == ("aborted", 3)
    assert world.log.take(req)["outcome"] == "aborted", "the client that aborted may still listen"


def test_namespaces_share_nothing(make_world, make_tokens):
    """sglang#37160, vllm#42119: keys leave out the adapter or the salt, or join them to what another request is called."""
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document, extra_key="tenant", cache_salt="salt")
    for names in (
        {},
        {"extra_key": "tenant"},
        {"cache_salt": "salt"},
        {"extra_key": "salt", "cache_salt": "tenant"},
        {"extra_key": "tenant", "lora_id": "tenant", "cache_salt": "salt"},
        {"extra_key": "tenantsalt"},
    ):
        assert promise(world, FakeRequest(str(names), document + make_tokens(5), **names)) == 0
    lora = FakeRequest("lora", document + make_tokens(5), "tenant", "salt", lora_id="adapter")
    assert promise(world, lora) == 0
    assert promise(world, FakeRequest("same", document + make_tokens(5), "tenant", "salt")) == 100


def test_requests_with_images_sessions_or_embeddings_are_refused(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    for name in (
        "session",
        "multimodal_inputs",
        "input_embeds",
        "positional_embed_overrides",
        "beam_group",
        "multi_item_delimiter_indices",
    ):
        req = FakeRequest(name, document + make_tokens(5))
        setattr(req, name, object())
        assert promise(world, req) == 0
        assert report(world, req)["miss"]["reason"] == MissReason.MODEL_REFUSED.value


READ_OFF_THE_PROMPT = [
    ({"return_logprob": True, "logprob_start_len": 0}, 9, "log-probabilities of the prompt"),
    ({"return_logprob": True, "logprob_start_len": 104}, 9, "log-probabilities of the prompt"),
    ({"return_hidden_states": True}, 9, "hidden states"),
    ({"return_hidden_states": "last"}, 9, "hidden states"),
    ({"return_routed_experts": True}, 9, "routed experts"),
    ({"return_indexer_topk": True}, 9, "the choice of sparse attention"),
    ({}, 0, "no token"),
]


@pytest.mark.parametrize(("fields", "max_new_tokens", "words"), READ_OFF_THE_PROMPT)
def test_requests_for_what_is_read_off_the_prompt_are_computed(make_world, make_tokens, fields, max_new_tokens, words):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("asks", document[20:] + make_tokens(25))
    req.sampling_params.max_new_tokens = max_new_tokens
    for name, value in fields.items():
        setattr(req, name, value)
    assert promise(world, req) == 0
    miss = report(world, req)["miss"]
    assert miss["reason"] == MissReason.MODEL_REFUSED.value
    assert words in miss["detail"]


def test_text_of_requests_for_what_is_read_off_the_prompt_becomes_a_donor(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    req = FakeRequest("asks", document, return_logprob=True, logprob_start_len=0)
    assert promise(world, req) == 0
    req.kv.cache_protected_len, req.is_finished = 100, True
    world.reuse.publishing.published(req, world.tree.insert(document, world.tree.allocate(100)))
    world.reuse.ends.released(req)
    assert promise(world, FakeRequest("query", document[20:] + make_tokens(9))) == 80


@pytest.mark.parametrize("start", [-1, 125])
def test_log_probabilities_of_the_answer_alone_are_those_of_the_mode(make_world, make_tokens, start):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document + make_tokens(25), return_logprob=True, logprob_start_len=start)
    assert promise(world, req) == 100


def finish_grafted(world, make_tokens, document, tail):
    """A request with an exact head of nothing, a gap, a copied region and a computed tail, up to its release."""
    req = FakeRequest("grafted", make_tokens(20) + document[:60] + tail)
    promise(world, req)
    row = world.tree.allocate(len(req.origin_input_ids))
    head = world.tree.insert(req.origin_input_ids[:20], row[:20])
    req.kv.cache_protected_len = req.prefix_len = 20
    row[20:80] = world.reuse.loading.load_next(req, room=500)
    req.owned, req.is_finished = len(req.origin_input_ids), True
    world.reuse.publishing.adopt_computed(req, row.int(), head)
    world.reuse.publishing.settle()
    return req


def test_text_computed_behind_a_copy_becomes_a_donor_of_the_next_generation(make_world, make_tokens):
    world, document, tail = make_world(), make_tokens(100), make_tokens(40)
    world.publish("donor", document)
    req = finish_grafted(world, make_tokens, document, tail)
    assert world.reuse.publishing.adopted(req) == [(20, 120)], "the copy as well: others go on from it"
    other = FakeRequest("other", make_tokens(5) + tail + make_tokens(5))
    promise(world, other)
    other.prefix_len = 5
    assert len(world.reuse.loading.load_next(other, room=500)) == 40
    (span,) = report(world, other)["spans"]
    assert (span["generation"], span["position_delta"]) == (1, -75)
    # No exact request can ask for it: its path has a name that nobody knows.
    assert all(key[0] is not None for key, (tokens, _) in world.tree.paths.items() if tokens[-40:] == tail)
    assert report(world, req)["shifted_tokens"] == 60


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_text_that_is_computed_exactly_replaces_its_approximate_donor(make_world, make_tokens, is_evicted):
    world, document, tail = make_world(), make_tokens(100), make_tokens(40)
    world.publish("donor", document)
    finish_grafted(world, make_tokens, document, tail)
    (old,) = [donor for donor in world.keeper.catalogue if donor.generation]
    if is_evicted:
        world.tree.evict(next(key for key, (tokens, _) in world.tree.paths.items() if tokens[-40:] == tail), 0)
        world.keeper.find(DonorQuery(old.namespace, old.token_ids))  # whereupon the keeper knows it
        assert world.keeper.host_bytes
    world.publish("healed", tail)
    assert not any(donor.generation for donor in world.keeper.catalogue)
    assert not world.keeper.host_bytes
    world.keeper.check()
    other = FakeRequest("other", make_tokens(5) + tail + make_tokens(5))
    promise(world, other)
    other.prefix_len = 5
    assert len(world.reuse.loading.load_next(other, room=500)) == 40
    (span,) = report(world, other)["spans"]
    assert (span["generation"], span["position_delta"]) == (0, 5)


def test_a_copy_that_was_promised_of_a_replaced_donor_is_made_or_computed(make_world, make_tokens):
    world, document, tail = make_world(), make_tokens(100), make_tokens(40)
    world.publish("donor", document)
    finish_grafted(world, make_tokens, document, tail)
    other = FakeRequest("other", tail + make_tokens(5))
    assert promise(world, other) == 40
    world.publish("healed", tail)
    assert promise(world, other) == 40
    assert world.reuse.loading.load_first(other, 40) == 40
    (span,) = report(world, other)["spans"]
    assert span["generation"] == 0


def test_generations_are_bounded(make_world, make_tokens):
    world, document, tail = make_world(max_generation=0), make_tokens(100), make_tokens(40)
    world.publish("donor", document)
    finish_grafted(world, make_tokens, document, tail)
    assert not any(donor.generation for donor in world.keeper.catalogue)
    assert promise(world, FakeRequest("other", tail + make_tokens(5))) == 0


def test_flushed_cache_has_no_donors(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.tree.evict(world.publish("donor", document), 50)
    world.reuse.books.clear()
    world.keeper.check()
    assert world.keeper.host_bytes == 0
    assert promise(world, FakeRequest("query", document + make_tokens(5))) == 0


@pytest.mark.parametrize("page_size", [4, 16])
def test_whole_pages_are_loaded(make_world, make_tokens, page_size):
    world, document = make_world(page_size=page_size), make_tokens(160)
    world.publish("donor", make_tokens(7) + document)
    req = FakeRequest("query", make_tokens(21) + document[:130] + make_tokens(9))
    promise(world, req)
    start = -(-21 // page_size) * page_size
    assert world.reuse.loading.next_gap(req, 0) == start
    req.prefix_len = start
    slots = world.reuse.loading.load_next(req, room=500)
    assert len(slots) == 151 // page_size * page_size - start
    assert len(slots) % page_size == 0


def test_two_requests_of_one_id_keep_what_is_theirs(make_world, make_tokens):
    """A client that went away may ask again under the same id, while its first request is still on its way."""
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document, cache_salt="tenant")
    first = FakeRequest("same", document[10:90] + make_tokens(10), cache_salt="tenant")
    promised = promise(world, first)
    stranger = FakeRequest("same", document[10:90] + make_tokens(10), cache_salt="stranger")
    assert promise(world, stranger) == 0
    assert world.reuse.loading.load_first(first, promised) == 80
    world.reuse.ends.aborted(stranger.cache_request_handle)
    (slots,) = world.reuse.loading.private_slots(first)
    assert len(slots) == 80
    assert report(world, first)["shifted_tokens"] == 80


def retract(world, req):
    world.reuse.ends.released(req)
    req.kv.cache_protected_len = 0


def test_report_does_not_become_better_when_a_request_is_retracted(make_world, make_tokens):
    """The answer goes on from what was copied the first time, even if nothing is copied the second time."""
    world, document = make_world(host_bytes=0), make_tokens(100)
    node = world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    world.reuse.loading.load_first(req, promise(world, req))
    req.output_ids = make_tokens(3)
    retract(world, req)
    world.tree.evict(node, 0)
    assert promise(world, req) == 0
    req.is_finished = True
    world.reuse.ends.released(req)
    entry = world.log.take(req)
    assert [attempt["shifted_tokens"] for attempt in entry["attempts"]] == [80, 0]
    assert entry["report"] == {k: v for k, v in entry["attempts"][0].items() if k in entry["report"]}
    assert entry["report"]["shifted_tokens"] == 80


def test_retracted_prompt_that_is_computed_exactly_is_published(make_world, make_tokens):
    """It copied the first time; as long as that is remembered, SGLang's tree gets nothing of it."""
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    world.reuse.loading.load_first(req, promise(world, req))
    assert req.skip_radix_cache_insert
    retract(world, req)
    world.reuse.books.clear()
    assert promise(world, req) == 0
    assert not req.skip_radix_cache_insert


def test_retracted_request_that_is_aborted_while_it_waits_is_reported_once(make_world, make_tokens, tmp_path):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    world.reuse.loading.load_first(req, promise(world, req))
    retract(world, req)
    world.reuse.ends.aborted(req.cache_request_handle)
    assert world.reuse.books.num_requests == 0
    last = json.loads((tmp_path / "reports.jsonl").read_text().splitlines()[-1])
    assert (last["request_id"], last["outcome"], last["report"]["shifted_tokens"]) == ("query", "aborted", 80)


def test_metrics_that_cannot_be_recorded_end_no_request(make_world, make_tokens, monkeypatch, caplog):
    world, document = make_world(), make_tokens(100)
    monkeypatch.setattr(world.log.metrics, "record", lambda _: 1 / 0)
    world.publish("donor", document)
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    assert world.reuse.loading.load_first(req, promise(world, req)) == 80
    assert report(world, req)["shifted_tokens"] == 80
    assert caplog.text.count("metrics cannot be recorded") == 1


def test_request_counts_once_however_often_it_is_retracted(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    world.publish("donor", document)
    metrics = world.log.metrics
    metrics.values.clear()
    req = FakeRequest("query", document[10:90] + make_tokens(10))
    for _ in range(3):
        world.reuse.loading.load_first(req, promise(world, req))
        retract(world, req)
    promise(world, req)
    report(world, req)
    assert metrics["grafted_requests"] == 1
    assert metrics["prompt_tokens", "segment", "approx"] == 80


def test_tokens_of_regions_that_were_not_loaded_do_not_count_as_recomputed(make_world, make_tokens):
    world, document = make_world(selection="first_k", first_k=10, host_bytes=0), make_tokens(300)
    world.publish("donor", document)
    tokens = document[1:61] + make_tokens(20) + document[100:160] + make_tokens(20) + document[200:290] + make_tokens(9)
    lost, kept = FakeRequest("lost", tokens), FakeRequest("kept", tokens)
    for req in (lost, kept):
        promise(world, req)
        req.prefix_len = 10
    assert world.reuse.loading.load_next(lost, room=0) is None
    assert report(world, lost)["recomputed_tokens"] == 0
    assert len(world.reuse.loading.load_next(kept, room=500)) == 50
    kept.prefix_len = 90
    assert world.reuse.loading.load_next(kept, room=0) is None
    assert report(world, kept)["recomputed_tokens"] == 10


def test_nothing_is_copied_after_weights_change_until_the_cache_is_flushed(make_world, make_tokens):
    world, document, evicted = make_world(), make_tokens(100), make_tokens(100)
    world.publish("donor", document)
    world.tree.evict(world.publish("evicted", evicted), 0)
    waiting = FakeRequest("waiting", document[10:90] + make_tokens(10))
    assert promise(world, waiting) == 80
    world.reuse.books.weights_change()
    assert world.reuse.promises.promised(waiting, 0) == 0
    assert world.reuse.loading.load_first(waiting, 80) == 0
    assert world.keeper.host_bytes == 0
    world.publish("old prefix", document + make_tokens(50))
    for text in (document, evicted):
        req = FakeRequest("query", text + make_tokens(5))
        assert promise(world, req) == 0
        assert report(world, req)["miss"]["reason"] == MissReason.REUSE_OFF.value
    world.reuse.books.clear()
    world.publish("donor", document)
    assert promise(world, FakeRequest("query", make_tokens(5) + document)) == 0
    assert promise(world, FakeRequest("query", document + make_tokens(5))) == 100


def test_request_that_ran_while_weights_changed_is_nobodys_donor(make_world, make_tokens):
    world, document, tail = make_world(), make_tokens(100), make_tokens(40)
    world.publish("donor", document)
    req = FakeRequest("grafted", document[:60] + tail)
    world.reuse.loading.load_first(req, promise(world, req))
    world.reuse.books.weights_change()
    row = world.tree.allocate(100)
    req.owned, req.is_finished = 100, True
    world.reuse.publishing.adopt_computed(req, row.int(), None)
    assert world.reuse.publishing.adopted(req) == []
    assert len(world.keeper.catalogue) == 0


def test_weights_that_change_while_the_cache_is_empty_change_nothing(make_world, make_tokens):
    """Trainers flush with every part of an update and then say that it was the last."""
    world, document = make_world(), make_tokens(100)
    world.reuse.books.weights_change()
    world.publish("donor", document)
    world.reuse.books.weights_change()
    world.reuse.books.clear()
    world.reuse.books.weights_change()
    world.publish("donor", document)
    assert promise(world, FakeRequest("query", document + make_tokens(5))) == 100


def compute(world, rid, tokens):
    """A request whose prompt has been computed, and whose first token has not been sent."""
    req = FakeRequest(rid, tokens)
    promise(world, req)
    return req, publish(world, req)


def publish(world, req):
    tokens = req.origin_input_ids
    req.kv.cache_protected_len = len(tokens)
    node = world.tree.insert(tokens, world.tree.allocate(len(tokens)))
    world.reuse.publishing.published(req, node)
    return node


def test_first_token_does_not_wait_for_its_text_to_become_a_donor(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    compute(world, "donor", document)
    assert len(world.keeper) == 0
    world.reuse.publishing.settle()
    assert len(world.keeper) == 1
    assert (world.log.metrics["donors"], world.log.metrics["donor_tokens"]) == (1, 100)


def test_text_is_found_by_whoever_asks_before_its_answer_is_sent(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    compute(world, "donor", document)
    assert promise(world, FakeRequest("query", document[10:90] + make_tokens(5))) == 80


@pytest.mark.parametrize("end", ["flush", "weights change"])
def test_text_is_no_donor_if_everything_was_forgotten_before_its_answer_was_sent(make_world, make_tokens, end):
    world, document = make_world(), make_tokens(100)
    compute(world, "donor", document)
    if end == "flush":
        world.tree.paths.clear()
        world.reuse.books.clear()
    else:
        world.reuse.books.weights_change()
    world.reuse.publishing.settle()
    assert len(world.keeper) == 0
    assert promise(world, FakeRequest("query", document[10:90] + make_tokens(5))) == 0


def test_text_that_is_evicted_before_its_answer_is_sent_is_kept_as_it_was(make_world, make_tokens):
    world, document = make_world(), make_tokens(100)
    req, node = compute(world, "donor", document)
    values = [buffer[world.tree.slots(node)].clone() for buffer in world.values]
    req.is_finished = True
    world.reuse.ends.released(req)
    world.tree.evict(node, 0)
    for buffer in world.values:
        buffer.zero_()  # somebody else has the slots
    query = FakeRequest("query", document[:90] + make_tokens(5))
    assert world.reuse.loading.load_first(query, promise(world, query)) == 90
    slots = torch.cat(world.reuse.loading.private_slots(query))
    for buffer, expected in zip(world.values, values, strict=True):
        assert torch.equal(buffer[slots], expected[:90])


def test_aborted_request_leaves_the_text_that_the_tree_has(make_world, make_tokens):
    """Its prompt was computed exactly and is in the tree, whoever waits for the answer; what it would answer is nobody's."""
    world, document = make_world(), make_tokens(100)
    req, _ = compute(world, "donor", document)
    world.reuse.ends.aborted(req.cache_request_handle)
    world.reuse.publishing.settle()
    assert world.reuse.books.num_requests == 0
    assert promise(world, FakeRequest("query", document[10:90] + make_tokens(5))) == 80
    world.keeper.check()


def test_text_computed_behind_a_copy_is_read_from_its_row_before_the_row_is_given_away(make_world, make_tokens):
    world, document, tail = make_world(), make_tokens(100), make_tokens(40)
    world.publish("donor", document)
    req = FakeRequest("grafted", document[:60] + tail)
    loaded = world.reuse.loading.load_first(req, promise(world, req))
    row = torch.cat([*world.reuse.loading.private_slots(req), world.tree.allocate(40)])
    req.owned, req.is_finished = loaded + 40, True
    world.reuse.publishing.adopt_computed(req, row, None)
    world.reuse.ends.released(req)
    row.zero_()  # the next request's
    world.tree.evict(next(key for key, (tokens, _) in world.tree.paths.items() if tokens[-40:] == tail), 0)
    assert world.keeper.host_bytes == 40 * world.pool.bytes_per_token


def test_text_that_cannot_be_registered_costs_no_other(make_world, make_tokens, monkeypatch, caplog):
    world, first, second = make_world(), make_tokens(100), make_tokens(100)
    requests = [FakeRequest(name, text) for name, text in (("first", first), ("second", second))]
    for req in requests:
        promise(world, req)
    register = world.keeper.register

    def fails_once(*args):
        monkeypatch.setattr(world.keeper, "register", register)
        raise RuntimeError("no memory")

    monkeypatch.setattr(world.keeper, "register", fails_once)
    for req in requests:
        publish(world, req)
    world.reuse.publishing.settle()
    assert (len(world.keeper), world.log.num_errors, world.keeper.num_published) == (1, 1, 0)
    assert "register" in caplog.text
    assert promise(world, FakeRequest("query", second[10:90] + make_tokens(5))) == 80
