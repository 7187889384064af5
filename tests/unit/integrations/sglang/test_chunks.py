"""Phased admission in front of an adder that keeps the books as SGLang's does: chunks, budgets, the queueing rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvgraft.integrations.sglang.planning.chunks import RegionAdmission

CONTINUE, OTHER, NO_TOKEN = "continue", "other", "no token"


class FakeAdder:
    """Cuts a request that does not fit into the chunk budget, and asserts what SGLang's scheduler asserts."""

    def __init__(self, tree_cache, chunk_tokens=256, slots=1000, page_size=1):
        self.tree_cache = tree_cache
        self.rem_chunk_tokens = chunk_tokens
        self.page_size = page_size
        self.slots = slots
        self.memory_budget = SimpleNamespace(total_offset=0, current_offset=0)
        self.can_run_list, self.new_chunked_req, self.chunked_req_limit = [], None, None
        self.running_batch = SimpleNamespace(is_empty=lambda: True, reqs=["stream"])

    @property
    def rem_total_tokens(self):
        return self.slots - self.memory_budget.total_offset

    def ceil_paged_tokens(self, tokens):
        return -(-tokens // self.page_size) * self.page_size

    def budget_state(self):
        if self.rem_total_tokens <= 0:
            return NO_TOKEN
        return CONTINUE if self.rem_chunk_tokens is None or self.rem_chunk_tokens > 0 else OTHER

    def add_one_req(self, req, has_chunked_req, truncation_align_size):
        rest = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        if rest + req.sampling_params.max_new_tokens >= self.rem_total_tokens:
            return NO_TOKEN
        req.prefix_len += req.host_hit_length
        length = rest if self.rem_chunk_tokens is None else min(rest, self.rem_chunk_tokens)
        if length < rest:
            assert not has_chunked_req
            assert self.new_chunked_req is None
            self.new_chunked_req = req
        self._take(req, length)
        return self.budget_state()

    def add_chunked_req(self, req):
        rest = len(req.full_untruncated_fill_ids) - req.prefix_len
        length = min(rest, self.rem_chunk_tokens, rest if self.chunked_req_limit is None else self.chunked_req_limit)
        self._take(req, length)
        return req if length < rest else None

    def _take(self, req, length):
        req.extend_end = req.prefix_len + length
        self.can_run_list.append(req)
        self.memory_budget.total_offset += length
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= length


class Adder(RegionAdmission, FakeAdder):
    passed_over, put_off = CONTINUE, OTHER
    most_output_tokens = 100


class FakeCache:
    """Regions by request: `{rid: [(start, length)]}`."""

    def __init__(self, regions=None):
        self.regions = regions or {}
        self.rooms, self.loads_first_only, self.naps, self.reading = [], [], [], set()
        self.most_rows, self.asked = 1 << 20, []  # rows of repairs in a step, and what running requests were shown
        self.changes, self.looked_up = {}, []  # what is found for a request that is looked up again, by rid

    def awaits_store(self, req, *, may_nap):
        self.naps.append(may_nap)
        return req.rid in self.reading

    def is_too_much(self, req, running, num_rows):
        self.asked.append(running)
        return num_rows > 0 and num_rows + self.rows_now(req) > self.most_rows

    def rows_now(self, req):
        return 10 * len(self.regions.get(req.rid, []))

    def look_up_again(self, req):
        self.looked_up.append(req.rid)
        if req.rid not in self.changes:
            return False
        self.changes.pop(req.rid)(self)
        return True

    def load_nothing_between_chunks(self, req):
        self.loads_first_only.append(req)

    def next_gap(self, req, position):
        starts = [start for start, _ in self.regions.get(req.rid, []) if start > position]
        return min(starts) - position if starts else None

    def load_between_chunks(self, req, room):
        self.rooms.append(room)
        for start, length in self.regions.get(req.rid, []):
            if start == req.prefix_len:
                req.prefix_len += length


def make_request(rid, length, host_hit=0, output=10):
    return SimpleNamespace(
        rid=rid,
        full_untruncated_fill_ids=range(length),
        prefix_len=0,
        host_hit_length=host_hit,
        output_ids=[],
        extend_end=None,
        sampling_params=SimpleNamespace(max_new_tokens=output),
    )


def test_first_chunk_ends_where_the_region_begins_and_leaves_the_budget_to_others():
    cache = FakeCache({"phased": [(40, 100)]})
    adder = Adder(cache)
    phased = make_request("phased", 200)
    assert adder.add_one_req(phased, False, None) == CONTINUE
    assert (phased.extend_end, adder.new_chunked_req) == (40, phased)
    assert adder.rem_chunk_tokens == 256 - 40
    whole = make_request("whole", 100)
    assert adder.add_one_req(whole, False, None) == CONTINUE
    assert adder.can_run_list == [phased, whole]
    assert adder.rem_chunk_tokens == 256 - 140


def test_prompt_that_is_passed_over_is_not_looked_up():
    cache = FakeCache({"phased": [(40, 100)], "other": [(40, 100)]})
    adder = Adder(cache, chunk_tokens=300)
    for rid, length in (("phased", 200), ("other", 200), ("long", 290), ("whole", 100)):
        adder.add_one_req(make_request(rid, length), False, None)
    assert cache.looked_up == ["phased", "whole"]


def test_prompt_is_admitted_as_it_is_found_when_its_turn_comes():
    cache = FakeCache()
    cache.changes["asked"] = lambda cache: cache.regions.update(asked=[(40, 100)])
    adder, asked = Adder(cache), make_request("asked", 200)
    adder.add_one_req(asked, False, None)
    assert (asked.extend_end, adder.new_chunked_req) == (40, asked)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.regions.update(asked=[(40, 100)]),  # it needs pieces by now
        lambda cache: cache.reading.add("asked"),
    ],
)
def test_prompt_that_is_found_otherwise_when_its_turn_comes_may_have_to_wait(change):
    cache = FakeCache({"phased": [(40, 100)]})
    cache.changes["asked"] = change
    adder = Adder(cache)
    adder.add_one_req(make_request("phased", 200), False, None)
    asked = make_request("asked", 200)
    assert adder.add_one_req(asked, False, None) == CONTINUE
    assert asked not in adder.can_run_list


def test_prompts_wait_for_the_next_step_when_repairs_of_this_one_are_enough():
    cache = FakeCache({rid: [(0, 40)] for rid in "abcd"})
    cache.most_rows = 25
    adder = Adder(cache)
    verdicts = [adder.add_one_req(make_request(rid, 50, host_hit=40), False, None) for rid in "abc"]
    assert verdicts == [CONTINUE, CONTINUE, OTHER]
    assert [req.rid for req in adder.can_run_list] == ["a", "b"]
    assert cache.asked[0] == ["stream"]
    later = Adder(cache)
    assert later.add_one_req(make_request("c", 50, host_hit=40), False, None) == CONTINUE


def test_rows_of_a_prompt_that_is_not_admitted_do_not_count():
    cache = FakeCache({rid: [(0, 40)] for rid in "ab"})
    cache.most_rows = 15
    adder = Adder(cache, slots=30)
    assert adder.add_one_req(make_request("a", 90, host_hit=40), False, None) == NO_TOKEN
    assert adder.rows_before == 0


def test_gap_is_counted_from_what_was_promised():
    cache = FakeCache({"phased": [(0, 50), (70, 30)]})
    phased = make_request("phased", 200, host_hit=50)
    Adder(cache).add_one_req(phased, False, None)
    assert (phased.prefix_len, phased.extend_end) == (50, 70)


def test_regions_are_loaded_between_chunks_until_the_prompt_is_done():
    cache = FakeCache({"phased": [(40, 100), (150, 30)]})
    phased = make_request("phased", 200)
    Adder(cache).add_one_req(phased, False, None)
    ends = []
    unfinished = phased
    while unfinished is not None:
        phased.prefix_len = phased.extend_end
        unfinished = Adder(cache).add_chunked_req(phased)
        ends.append((phased.prefix_len, phased.extend_end))
    assert ends == [(140, 150), (180, 200)]


@pytest.mark.parametrize("is_running", [True, False], ids=["in an earlier step", "in this step"])
def test_second_prompt_in_pieces_waits_and_those_behind_it_are_looked_at(is_running):
    cache = FakeCache({"first": [(40, 100)], "second": [(20, 100)]})
    adder = Adder(cache)
    if not is_running:
        adder.add_one_req(make_request("first", 200), False, None)
    admitted = list(adder.can_run_list)
    assert adder.add_one_req(make_request("second", 200), is_running, None) == CONTINUE
    assert adder.add_one_req(make_request("long", 900), is_running, None) == CONTINUE
    assert adder.can_run_list == admitted
    small = make_request("small", 50)
    adder.add_one_req(small, is_running, None)
    assert adder.can_run_list == [*admitted, small]


def test_prompt_that_fits_only_with_its_reuse_waits_too():
    """If its load failed it would have to be cut, and SGLang follows one cut prompt only."""
    adder = Adder(FakeCache())
    assert adder.add_one_req(make_request("hit", 300, host_hit=280), True, None) == CONTINUE
    assert adder.can_run_list == []


def test_waiting_prompt_is_first_when_the_pieces_are_done():
    cache = FakeCache({"second": [(20, 100)]})
    adder = Adder(cache)
    last = make_request("first", 200)
    last.prefix_len = 190
    assert adder.add_chunked_req(last) is None
    second = make_request("second", 200)
    adder.add_one_req(second, False, None)
    assert adder.new_chunked_req is second


def test_rest_of_a_phased_prompt_is_reserved_so_that_others_do_not_take_its_slots():
    cache = FakeCache({"phased": [(40, 300)]})
    adder = Adder(cache, slots=500)
    adder.add_one_req(make_request("phased", 400, output=50), False, None)
    assert adder.rem_total_tokens == 500 - 400 - 50
    assert adder.add_one_req(make_request("other", 45), False, None) == NO_TOKEN
    later = Adder(cache, slots=100)
    phased = make_request("phased", 400, output=50)
    phased.prefix_len = 340
    later.rem_chunk_tokens = 20
    assert later.add_chunked_req(phased) is phased
    assert later.rem_total_tokens == 100 - 60 - 50
    assert cache.rooms == [100]


def test_reserved_output_is_bounded_as_sglangs_is():
    adder = Adder(FakeCache({"phased": [(40, 100)]}), slots=10_000)
    adder.add_one_req(make_request("phased", 200, output=5000), False, None)
    assert adder.memory_budget.total_offset == 200 + 100


def test_without_chunks_or_with_aligned_cuts_nothing_is_phased():
    cache = FakeCache({"phased": [(40, 100)]})
    for adder, align in ((Adder(cache, chunk_tokens=None), None), (Adder(cache), 4096)):
        request = make_request("phased", 200)
        adder.add_one_req(request, False, align)
        assert request.extend_end == 200
        assert cache.loads_first_only.pop() is request


def test_prompt_whose_text_is_being_read_keeps_its_place_and_lets_others_pass():
    cache = FakeCache()
    cache.reading = {"reads"}
    adder, reads, whole = Adder(cache), make_request("reads", 100), make_request("whole", 50)
    assert adder.add_one_req(reads, False, None) == CONTINUE
    assert adder.add_one_req(whole, False, None) == CONTINUE
    assert adder.can_run_list == [whole]
    cache.reading = set()
    assert adder.add_one_req(reads, False, None) == CONTINUE
    assert adder.can_run_list == [whole, reads]
    assert cache.naps == [True, True, False], "whoever has something to compute does not wait a moment"


@pytest.mark.parametrize("busy", ["running", "chunked"])
def test_scheduler_that_has_something_to_compute_waits_for_no_read(busy):
    cache = FakeCache()
    cache.reading = {"reads"}
    adder = Adder(cache)
    adder.running_batch = SimpleNamespace(is_empty=lambda: busy != "running")
    adder.add_one_req(make_request("reads", 100), busy == "chunked", None)
    assert cache.naps == [False]
