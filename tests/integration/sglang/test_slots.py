"""Nothing reads K/V before the pass that computes them was launched, or after their slots are another text's.

SGLang's own scheduler runs here, in all its orders: overlap scheduling, prompts in chunks whose beginnings others hit,
several requests of one new beginning in a batch, mixed batches, retraction, aborts, eviction. The model alone is replaced
(`loop.py`).
"""

from __future__ import annotations

import collections
import itertools
from array import array

import pytest
from hypothesis import HealthCheck, given, settings, strategies
from loop import Loop, NotComputedError, build_scheduler, next_token

from kvgraft.integrations.sglang.donors.texts import Origin, TreeText

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

EXAMPLES = 300
BEGINNINGS = [[3 + 7 * number + index for index in range(50)] for number in (1, 2)]
DOCUMENTS = [[300 * number + index for index in range(120)] for number in (1, 2, 3)]
LATER = 1000
"""Tokens from here on are in no document."""


@pytest.fixture(scope="module", params=[1, 4], ids=["pages of 1", "pages of 4"])
def loop(request, model_dir, tmp_path_factory):
    settings = {
        "host_bytes": 128 << 10,
        "phase_cost_tokens": 1,
        "lookup_deadline_ms": 1e9,
        "state_dir": tmp_path_factory.mktemp("state"),
    }
    return Loop(build_scheduler(model_dir("llama-1-layer"), settings, request.param))


@pytest.fixture(autouse=True)
def clean(loop):
    loop.reset()
    loop.is_late = False


def fresh():
    """An iterator over tokens that neighbour one another nowhere else."""
    return (LATER + number * 389 % 1031 for number in itertools.count())


def take(tokens, count):
    return list(itertools.islice(tokens, count))


def script(*rounds):
    """Act once per round; a round is a list of requests as arguments of `Loop.submit`, with keywords last."""
    left = collections.deque(rounds)

    def act(loop):
        for *request, options in left.popleft() if left else ():
            loop.submit(*request, **options)
        return not left

    return act


GRAFT, OFF = {}, {"reuse": "off"}
NEVER = {"rows_per_step": 0, "exact_from_token": None, "healed_tokens": 0}


def shared_beginning(when, repair="before"):
    """The case of vLLM: D is known; A = S + other is computed while, or in the batch in which, B = S + G + D + q comes."""
    tokens, (system, _), (document, *_) = fresh(), BEGINNINGS, DOCUMENTS
    a = ("a", system + take(tokens, 150), 2, OFF)
    b = ("b", system + take(tokens, 30) + document + take(tokens, 9), 3, {"repair": repair})
    c = ("c", system + b[1][50:80] + take(tokens, 40), 2, OFF)
    between = {"in one batch": [[a, b]], "while A is computed in chunks": [[a], [], [b]]}[when]
    return script([("d", take(tokens, 5) + document, 2, GRAFT)], *[[]] * 6, *between, *[[]] * 12, [c])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize("when", ["in one batch", "while A is computed in chunks"])
@pytest.mark.parametrize("repair", ["before", "after"])
def test_beginning_that_is_being_computed_is_read_behind_its_pass(loop, repair, when, chunk, overlap):
    loop.run(shared_beginning(when, repair), overlap=overlap, chunk=chunk)
    reports = loop.reports()
    assert reports["b"]["shifted_tokens"] > 80
    assert reports["b"]["recomputed_tokens"] > 0
    # What stands in front of the first copy was published, and is what a full prefill computes.
    assert reports["c"]["exact_tokens"] == 80
    assert loop.num_recomputed > 0
    # Before a repair after the first token SGLang has had the results of the pass that drew it.
    assert bool(loop.num_unfinished) == (overlap and repair == "before")
    assert (
        reports["b"]["repair"] == {"time": repair, "reason": None, "from_token": 1 if repair == "before" else 2} | NEVER
    )


def test_account_notices_a_model_that_runs_later_than_it_is_launched(loop):
    """Control: copies and passes of ours are right because the stream that runs the model is theirs, too."""
    loop.is_late = True
    with pytest.raises(NotComputedError, match="before its pass has run"):
        loop.run(shared_beginning("while A is computed in chunks"), overlap=True, chunk=32)


def test_account_notices_text_that_is_published_before_its_pass(loop, monkeypatch):
    """Control: what would happen if SGLang let a request hit what another computes in the same step, as vLLM does."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    prepare, scheduler = ScheduleBatch.prepare_for_extend, loop.scheduler

    def published_first(batch):
        prepare(batch)
        req = batch.reqs[0]
        scheduler.tree_cache.checkpoint(req, up_to=req.extend_end)
        loop.reuse.publishing.settle()
        loop.check_donors()

    monkeypatch.setattr(ScheduleBatch, "prepare_for_extend", published_first)
    with pytest.raises(NotComputedError, match="before its pass has run"):
        loop.run(shared_beginning("in one batch"), overlap=True, chunk=512)


def answered(tokens, count):
    """A prompt with its answer of `count` tokens."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens)))
    return tokens


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("repair", ["before", "after"])
def test_turns_go_on_and_exact_requests_beside_them_do_not(loop, repair, overlap):
    """Two turns of one session at once, an exact request of the same text, and a flush."""
    tokens, told = fresh(), []
    prompt = take(tokens, 30) + DOCUMENTS[0] + take(tokens, 9)
    loop.run(script([("d", take(tokens, 5) + DOCUMENTS[0], 2, GRAFT)]), overlap=overlap)
    loop.run(script([("0", prompt, 6, {"repair": repair})]), overlap=overlap)
    for number in range(1, 4):
        prompt = answered(prompt, 6) + take(tokens, 7)
        both = [(f"{number} {name}", prompt, 6, {"repair": repair}) for name in "ab"]
        loop.run(script(both), overlap=overlap)
        told += [loop.reports()[rid] for rid, *_ in both]
    page = loop.cache.page_size
    for number, report in enumerate(told):
        assert report["computed_tokens"] < 7 + 1 + 2 * page
        assert report["shifted_tokens"] == report["recomputed_tokens"] == 0
        assert report["continued_tokens"] > 120 + 9 * (number // 2)
    loop.run(script([("exact", prompt, 2, {"reuse": "exact"})]), overlap=overlap)  # fails if it attends to copies
    assert loop.reports()["exact"]["continued_tokens"] == 0
    assert loop.flush()
    loop.run(script([("last", prompt, 2, GRAFT)]), overlap=overlap)
    assert loop.reports()["last"]["computed_tokens"] == len(prompt)
    assert loop.reuse.books.log.num_errors == 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_retracted_prompt_that_is_computed_exactly_is_hit_by_the_next(loop, overlap):
    """The copies of before it was retracted are gone, and nobody has its text any more."""
    tokens, rounds = fresh(), itertools.count()
    prompt = take(tokens, 30) + DOCUMENTS[0] + take(tokens, 9)
    requests = {0: ("d", take(tokens, 5) + DOCUMENTS[0], 2), 8: ("a", prompt, 20), 60: ("b", prompt, 2)}

    def act(loop):
        number = next(rounds)
        if number in requests:
            loop.submit(*requests[number])
        if number == 16:
            loop.retract()
            loop.evict(10_000)
            loop.reuse.books.keeper.clear()
        return number > max(requests)

    loop.run(act, overlap=overlap)
    reports = loop.reports()
    assert reports["a"]["shifted_tokens"] > 80
    assert reports["b"]["exact_tokens"] >= len(prompt) - 4


PIECE = strategies.tuples(
    strategies.integers(0, 2), strategies.integers(0, 40), strategies.integers(20, 80), strategies.integers(0, 12)
)
REQUEST = strategies.fixed_dictionaries(
    {
        "beginning": strategies.sampled_from([0, None, 0, 1]),
        "head": strategies.integers(0, 30),
        "pieces": strategies.lists(PIECE, min_size=1, max_size=3),
        "num_tokens": strategies.sampled_from([1, 1, 2, 5, 20]),
        "reuse": strategies.sampled_from(["graft", "graft", "graft", "off", "exact"]),
        "repair": strategies.sampled_from(["after", "after", "before"]),
        "tenant": strategies.sampled_from([None, None, None, "other"]),
    }
)
EVENT = strategies.one_of(
    REQUEST,
    REQUEST,
    REQUEST,
    strategies.tuples(strategies.just("abort"), strategies.integers(0, 3)),
    strategies.tuples(strategies.just("evict"), strategies.integers(1, 400)),
    strategies.tuples(strategies.sampled_from(["retract", "flush"])),
)
DONOR = {"beginning": None, "head": 5, "num_tokens": 1, "reuse": "graft", "repair": "after", "tenant": None}
ROUNDS = strategies.lists(strategies.lists(EVENT, max_size=2), min_size=4, max_size=30)


class Traffic:
    """Acts as a list of rounds says."""

    def __init__(self, rounds):
        donors = [{**DONOR, "pieces": [(number, 0, 120, 0)]} for number in range(2)]
        self.rounds, self.tokens = collections.deque([donors, [], *rounds]), fresh()
        self.number, self.seen = 0, collections.Counter()

    def __call__(self, loop):
        for event in self.rounds.popleft() if self.rounds else ():
            if isinstance(event, dict):
                self.submit(loop, **event)
            else:
                getattr(self, event[0])(loop, *event[1:])
        return not self.rounds

    def submit(self, loop, beginning, head, pieces, num_tokens, **names):
        self.number += 1
        prompt = [] if beginning is None else list(BEGINNINGS[beginning])
        prompt += take(self.tokens, head)
        for document, first, length, gap in pieces:
            prompt += DOCUMENTS[document][first : first + length] + take(self.tokens, gap)
        self.seen["beginning of a prompt in chunks"] += (
            loop.scheduler.chunked_req is not None
            and loop.scheduler.chunked_req.origin_input_ids[:50].tolist() == prompt[:50]
        )
        loop.submit(f"request {self.number}.", [*prompt, next(self.tokens)], num_tokens, **names)

    def abort(self, loop, back):
        chunked = loop.scheduler.chunked_req
        self.seen["aborted between chunks"] += chunked is not None and chunked.rid == f"request {self.number - back}."
        loop.abort(f"request {self.number - back}.")

    def evict(self, loop, count):
        loop.evict(count)

    def flush(self, loop):
        self.seen["flushed"] += loop.flush()

    def retract(self, loop):
        self.seen["retracted"] += bool(loop.scheduler.running_batch.reqs or loop.scheduler.chunked_req)
        loop.retract()


def test_in_any_order_everything_that_is_read_was_computed(loop, monkeypatch):
    seen = collections.Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        rounds=ROUNDS,
        overlap=strategies.booleans(),
        consecutive=strategies.booleans(),
        mixed=strategies.booleans(),
        chunk=strategies.sampled_from([16, 32, 64, 512]),
    )
    def run(rounds, overlap, consecutive, mixed, chunk):
        # SGLang may take a prefill's results before it launches the next one, which is prepared by then.
        monkeypatch.setenv("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", str(int(consecutive)))
        loop.reset()
        traffic = Traffic(rounds)
        loop.run(traffic, overlap=overlap, chunk=chunk, mixed=mixed)
        assert loop.reuse.books.num_requests == 0
        assert loop.reuse.books.log.num_errors == 0
        reports = loop.reports().values()
        seen.update(traffic.seen)
        seen["copied"] += sum(report["shifted_tokens"] > 0 for report in reports)
        seen["recomputed"] += sum(report["recomputed_tokens"] > 0 for report in reports)
        seen["behind a launch"] += loop.num_unfinished > 0
        seen["repaired after the first token"] += loop.num_repaired > 0
        assert not loop.reuse.repairs.waiting

    run()
    wanted = [
        "beginning of a prompt in chunks",
        "aborted between chunks",
        "retracted",
        "flushed",
        "copied",
        "recomputed",
    ]
    wanted += ["behind a launch", "repaired after the first token"]
    assert all(seen[name] for name in wanted), seen


@pytest.mark.parametrize("is_touched", [False, True])
def test_looking_for_a_donor_leaves_the_order_of_eviction_alone(loop, is_touched):
    """Ranks of tensor parallelism may look for different ones, as where one of them has failed, and must evict the same."""
    tokens, tree = fresh(), loop.reuse.books.keeper._tree
    first, second = take(tokens, 40), take(tokens, 40)
    loop.run(script([("a", first, 1, OFF)], *[[]] * 4, [("b", second, 1, OFF)]), overlap=False)
    texts = [TreeText(array("q", each), None, None, None, 0, 0, Origin("")) for each in (first, second)]
    assert [tree.resident(text, 40).length for text in texts] == [40, 40]
    found = tree.resident(texts[0], 20)
    assert found.length == 20
    if is_touched:
        tree.touch(texts[0], 40)
    loop.evict(1)
    assert [tree.resident(text, 40).length for text in texts] == ([40, 0] if is_touched else [0, 40])


def test_eviction_that_breaks_off_leaves_no_text_in_slots_of_another(loop, monkeypatch):
    """What SGLang freed by then is handed over before it is allocated again, not with what it evicts next."""
    tokens = fresh()
    loop.run(script([("d", take(tokens, 5) + DOCUMENTS[0], 1, GRAFT)]), overlap=False)
    loop.reuse.publishing.settle()
    monkeypatch.setattr(loop.cache, "update_eviction_metrics", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.reuse.books.keeper._tree.allocate(loop.buffers.num_slots // 2 + 400)
    monkeypatch.undo()
    # Texts too short to be donors, in slots of the document.
    loop.run(script([(f"short {number}", take(tokens, 9), 1, GRAFT) for number in range(90)]), overlap=False)
    loop.evict(10_000)
    loop.check_donors()
    assert not loop.cache._freed_by_eviction


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_insertion_that_breaks_off_frees_every_slot_once(loop, monkeypatch, is_done):
    """SGLang counts its slots when it is idle."""
    tokens, insert = fresh(), loop.cache.insert
    loop.run(script([("d", take(tokens, 5) + DOCUMENTS[0], 1, GRAFT)]), overlap=False)

    def broken(params):
        if not loop.reuse.books.request_texts.is_private(params.key.cache_salt):
            return insert(params)
        if is_done:
            insert(params)
        raise MemoryError("no memory")

    monkeypatch.setattr(loop.cache, "insert", broken)
    loop.run(script([("a", take(tokens, 30) + DOCUMENTS[0] + take(tokens, 40), 2, GRAFT)]), overlap=False)
    monkeypatch.undo()
    assert loop.reuse.books.log.num_errors == 1
    loop.run(script([("b", take(tokens, 20) + DOCUMENTS[0] + take(tokens, 9), 2, GRAFT)]), overlap=False)
    assert min(loop.reports()[name]["shifted_tokens"] for name in "ab") > 80
    loop.reuse.books.request_texts.empty_tree()
    assert loop.cache.full_evictable_size() == 0
    loop.scheduler.on_idle()
