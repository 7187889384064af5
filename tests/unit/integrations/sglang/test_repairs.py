"""Repair after the first token: which requests wait for it, what it computes, and what reports say of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.integrations.sglang.conftest import FakeRequest
from tests.unit.integrations.sglang.rank_threads import FailsElsewhere
from tests.unit.integrations.sglang.test_recompute import LAYERS, SLOTS, Case
from tests.unit.integrations.sglang.test_requests import promise, report

from kvgraft.errors import PolicyError
from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.select import FirstK, NoRecompute, QuerySeam
from kvgraft.graft.steps import GraftWork
from kvgraft.integrations.sglang.planning.ranks import Ranks
from kvgraft.integrations.sglang.plugin import _early_results
from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
from kvgraft.integrations.sglang.recompute.slot_attention import Recomputation
from kvgraft.integrations.sglang.requests.repairs import Repairs
from kvgraft.reuse.repair_time import CONSTRAINED, RepairPlan
from kvgraft.types import MissReason, RepairTime

BEFORE, AFTER = RepairTime.BEFORE, RepairTime.AFTER
NONE = np.empty(0, np.int64)


@pytest.mark.parametrize(
    ("asked", "num_tokens_left", "refusal", "planned"),
    [
        (AFTER, 2, "", RepairPlan(AFTER)),
        (AFTER, 1, "", RepairPlan(BEFORE, "one token was asked for")),
        (AFTER, 0, "", RepairPlan(BEFORE, "one token was asked for")),
        (AFTER, 9, "--enable-lora", RepairPlan(BEFORE, "--enable-lora")),
        (BEFORE, 9, "", RepairPlan(BEFORE)),
        (BEFORE, 1, "--enable-lora", RepairPlan(BEFORE)),
    ],
)
def test_time_is_that_asked_for_or_has_a_reason(asked, num_tokens_left, refusal, planned):
    assert Repairs(None, None, refusal).planned(asked, num_tokens_left) == planned


@pytest.mark.parametrize(
    ("asked", "num_tokens_left", "refusal", "reason"),
    [
        (AFTER, 9, "", "its answer was begun before a retraction"),
        (AFTER, 1, "", "one token was asked for"),
        (AFTER, 9, "--enable-lora", "--enable-lora"),
        (BEFORE, 9, "", ""),
    ],
)
def test_answer_that_goes_on_waits_for_its_repair(asked, num_tokens_left, refusal, reason):
    assert Repairs(None, None, refusal).planned(asked, num_tokens_left, num_drawn=1) == RepairPlan(BEFORE, reason)


class NotedPasses:
    """Stands in for a `Recomputer`; notes what it was asked for, and in which slots."""

    def __init__(self, failure=None):
        self.calls, self.plans, self.failure = [], [], failure

    def agreed_policy(self, num_reused, tail):
        return FirstK(4), False

    def in_step(self, act, failed):
        return act()

    def run(self, token_ids, plan, slots, policy):
        return self._run("before", plan, slots)

    def repair(self, token_ids, plan, slots, policy):
        return self._run("after", plan, slots)

    def run_all(self, token_ids, slots, start):
        self.calls.append(("all", slots.tolist()[start:]))

    def _run(self, when, plan, slots):
        self.calls.append((when, slots.tolist()))
        self.plans.append((plan.num_tokens, plan.spans, plan.compute.tolist()))
        if self.failure is not None:
            raise self.failure
        runs = tuple((span.target_start, 4) for span in plan.spans)
        return GraftWork(NONE, runs, 11, NONE, (), ())


class Ask:
    """A request for 80 known tokens and 20 new ones, up to the end of its prefill."""

    def __init__(self, make_world, make_tokens, failure=None, max_new_tokens=32, **settings):
        self.world, document = make_world(**settings), make_tokens(100)
        self.world.publish("donor", document)
        self.world.reuse.repairs.passes.recomputer = self.made = NotedPasses(failure)
        self.world.planner._left_out = NoRecompute()  # heads of runs are copied, as a planner with passes has them
        sampling = SimpleNamespace(custom_params=None, max_new_tokens=max_new_tokens, regex=None, ebnf=None)
        self.req = FakeRequest("query", document[10:90] + make_tokens(20), sampling_params=sampling)
        self.row = torch.arange(500, 700, dtype=torch.int32)

    def prefill(self, **params):
        self.req.sampling_params.custom_params = params
        self.world.reuse.loading.load_first(self.req, promise(self.world, self.req))
        self.world.reuse.repairs.recompute(self.req, self.row[:80].long())
        return self

    def draw(self):
        self.req.output_ids.append(7)
        return self

    def decode(self):
        """What `GraftRadixCache` does before a batch in which the request has a row of a drawn token."""
        for req in self.world.reuse.repairs.due([FakeRequest("other", self.req.origin_input_ids), self.req]):
            self.world.reuse.repairs.repair(req, self.row)
        return self.draw()

    def told(self):
        return report(self.world, self.req)


@pytest.fixture
def ask(make_world, make_tokens):
    return lambda **options: Ask(make_world, make_tokens, **{"selection": "first_k", **options})


def test_choice_is_computed_once_before_the_first_row_of_a_drawn_token(ask):
    asked = ask().prefill()
    assert asked.made.calls == []
    asked.draw().decode().decode()
    assert asked.made.calls == [("after", list(range(500, 600)))]
    told = asked.told()
    assert (told["recomputed_tokens"], told["corrected_tokens"], told["shifted_tokens"]) == (4, 11, 76)
    assert (told["repair"]["time"], told["repair"]["from_token"]) == ("after", 2)
    assert "recompute" in told["timings_ms"]


@pytest.mark.parametrize(("setting", "params"), [("before", {}), ("after", {"kvgraft_repair": "before"})])
def test_choice_is_computed_before_the_first_token_where_that_is_asked_for(ask, setting, params):
    asked = ask(repair=setting).prefill(**params)
    assert asked.made.calls == [("before", list(range(500, 580)))]
    asked.draw().decode()
    assert len(asked.made.calls) == 1
    told = asked.told()["repair"]
    assert (told["time"], told["reason"], told["from_token"]) == ("before", None, 1)


def test_request_may_ask_for_after(ask):
    asked = ask(repair="before").prefill(kvgraft_repair="after").draw().decode()
    assert [when for when, _ in asked.made.calls] == ["after"]


def test_one_token_waits_for_its_repair_and_says_so(ask):
    asked = ask(max_new_tokens=1).prefill().draw()
    told = asked.told()["repair"]
    assert (told["time"], told["reason"], told["from_token"]) == ("before", "one token was asked for", 1)


@pytest.mark.parametrize("rule", ["regex", "ebnf"])
def test_a_constrained_answer_waits_for_its_repair_and_says_so(ask, rule):
    asked = ask()
    setattr(asked.req.sampling_params, rule, "yes|no")
    told = asked.prefill().draw().told()["repair"]
    assert (told["time"], told["reason"], told["from_token"]) == ("before", CONSTRAINED, 1)


def test_wrong_time_reuses_nothing(ask):
    asked = ask()
    asked.req.sampling_params.custom_params = {"kvgraft_repair": "later"}
    assert promise(asked.world, asked.req) == 0
    miss = asked.told()["miss"]
    assert miss["reason"] == MissReason.REUSE_OFF.value
    assert miss["detail"] == "custom_params['kvgraft_repair'] must be before or after, not 'later'"


def ended(asked):
    return asked.told()["repair"]


def aborted(asked):
    asked.req.to_finish = "FINISH_ABORT"
    return asked.decode().told()["repair"]


@pytest.mark.parametrize("end", [ended, aborted])
def test_answer_that_ends_at_its_first_token_repairs_nothing(ask, end):
    asked = ask().prefill().draw()
    assert end(asked)["from_token"] is None
    assert asked.made.calls == []
    assert asked.world.reuse.repairs.due([asked.req]) == []


def test_aborted_request_waits_for_nothing(ask):
    asked = ask().prefill().draw()
    asked.world.reuse.ends.aborted(asked.req.cache_request_handle)
    assert asked.world.reuse.repairs.due([asked.req]) == []


@pytest.mark.parametrize("num_decoded", [0, 1, 3])
def test_retracted_request_draws_its_next_token_from_repaired_copies(ask, num_decoded):
    asked = ask().prefill().draw()
    for _ in range(num_decoded):
        asked.decode()
    asked.world.reuse.ends.released(asked.req)
    assert asked.world.reuse.repairs.due([asked.req]) == []
    tokens = asked.req.full_untruncated_fill_ids
    asked.world.reuse.loading.load_first(
        asked.req, asked.world.reuse.promises.promise(asked.req, tokens, len(tokens) - 1, 0)
    )
    asked.made.plans.clear()
    asked.world.reuse.repairs.recompute(asked.req, asked.row[:80].long())
    assert asked.made.calls[-1] == ("before", list(range(500, 580))), "the next token is drawn after this"
    ((num_tokens, _, computed),) = asked.made.plans
    assert (num_tokens, computed) == (100, list(range(80, 100))), (
        "the choice is made for the prompt, not for the answer"
    )
    asked.draw().decode()
    assert asked.made.calls[-1][0] == "before", "it is repaired once"
    asked.req.is_finished = True
    asked.world.reuse.ends.released(asked.req)
    entry = asked.world.log.take(asked.req)
    first, second = (attempt["repair"]["from_token"] for attempt in entry["attempts"])
    assert first == (2 if num_decoded else None)
    assert second == num_decoded + 2  # num_decoded + 1 were drawn before
    # Of two attempts the one with more copies that stayed speaks: the first one, where it was not repaired.
    assert entry["report"]["repair"]["from_token"] == (second if num_decoded else None)


def test_answer_that_a_donor_has_is_computed_as_before_the_retraction(ask, make_tokens):
    """Else what a request answers after a retraction comes from copies of its answer, which it computed before."""
    asked = ask().prefill()
    answer = make_tokens(40)
    asked.world.publish("the same answer", make_tokens(9) + answer)
    asked.req.output_ids += answer
    asked.world.reuse.ends.released(asked.req)
    tokens = asked.req.full_untruncated_fill_ids
    assert asked.world.reuse.promises.promise(asked.req, tokens, len(tokens) - 1, 0) == 80
    assert asked.world.reuse.loading.next_gap(asked.req, 80) is None


def test_answer_that_the_exact_tree_has_by_now_needs_no_copies(ask):
    asked = ask().prefill().draw().draw()
    asked.world.reuse.ends.released(asked.req)
    tokens = asked.req.full_untruncated_fill_ids
    assert asked.world.reuse.promises.promise(asked.req, tokens, len(tokens) - 1, len(tokens) - 1) == 0
    assert asked.told()["exact_tokens"] == 101


def test_last_token_of_a_retracted_request_waits_for_its_repair(ask):
    asked = ask(max_new_tokens=2).prefill().draw()
    asked.world.reuse.ends.released(asked.req)
    tokens = asked.req.full_untruncated_fill_ids
    asked.world.reuse.loading.load_first(
        asked.req, asked.world.reuse.promises.promise(asked.req, tokens, len(tokens) - 1, 0)
    )
    asked.world.reuse.repairs.recompute(asked.req, asked.row[:80].long())
    told = asked.told()["repair"]
    assert (told["time"], told["reason"], told["from_token"]) == ("before", "one token was asked for", 2)


def test_kv_of_other_weights_are_not_repaired(ask):
    asked = ask().prefill().draw()
    asked.world.reuse.books.weights_change()
    asked.decode()
    assert asked.made.calls == []
    assert asked.told()["repair"]["from_token"] is None


def test_kv_of_other_weights_are_not_computed_again_between_chunks(ask):
    asked = ask(repair="before")
    asked.world.reuse.loading.load_first(asked.req, promise(asked.world, asked.req))
    asked.world.reuse.books.weights_change()
    asked.world.reuse.repairs.recompute(asked.req, asked.row[:80].long())
    assert asked.made.calls == []


def test_policy_that_fails_after_the_first_token_leaves_the_report_of_that_token(ask):
    asked = ask(failure=PolicyError("selection policy broken: no step")).prefill().draw().decode()
    assert asked.made.calls[-1] == ("all", list(range(500, 600)))
    told = asked.told()
    assert told["spans"], "the first token was drawn from copies"
    assert told["recomputed_tokens"] == 80
    assert (told["repair"]["from_token"], told["repair"]["exact_from_token"]) == (2, 2)
    assert told["repair"]["healed_tokens"] == 100, "of the first copy and all after it"
    assert asked.world.log.num_errors == 1


def test_pass_that_fails_is_counted_and_not_tried_again(ask):
    asked = ask(failure=RuntimeError("no memory")).prefill().draw().decode().decode()
    assert len(asked.made.calls) == 1
    told = asked.told()
    assert (told["policy"], told["repair"], told["recomputed_tokens"]) == ("none", None, 0)
    assert asked.world.log.num_errors == 1


def test_without_passes_of_our_own_sglang_computes_the_choice_before_the_first_token(ask):
    asked = ask()
    asked.world.reuse.repairs.passes.recomputer = None
    asked.world.reuse.repairs.refusal = "--enable-lora, whose adapters are chosen per batch"
    told = asked.prefill().draw().told()["repair"]
    assert (told["time"], told["from_token"]) == ("before", 1)
    assert told["reason"] == "--enable-lora, whose adapters are chosen per batch"


class Burst:
    """Requests of 80 known tokens whose repairs take 30 rows each, and an answer that streams."""

    def __init__(self, make_world, make_tokens, **settings):
        self.world, document = make_world(selection="first_k", **settings), make_tokens(100)
        self.world.publish("donor", document)
        self.world.reuse.repairs.passes.recomputer = self.made = NotedPasses()
        self.made.expected_rows = lambda num_reused: 30
        self.world.planner._left_out = NoRecompute()
        self.stream = FakeRequest("stream", make_tokens(9))
        self.reqs = [FakeRequest(name, document[10:90] + make_tokens(20)) for name in "abcd"]

    def admit(self, req):
        self.world.reuse.loading.load_first(req, promise(self.world, req))
        self.world.reuse.repairs.recompute(req, torch.arange(500, 580))

    def is_put_off(self, req, running, num_rows=0):
        promise(self.world, req)
        return self.world.reuse.repairs.is_too_much(req, running, num_rows)


def test_burst_is_repaired_over_several_steps_while_others_stream(make_world, make_tokens):
    burst = Burst(make_world, make_tokens)
    burst.world.reuse.repairs.most_rows = 70
    first, second, third, _ = burst.reqs
    running = [burst.stream]
    for req in (first, second):
        assert not burst.is_put_off(req, running)
        burst.admit(req)
        running.append(req)
    assert burst.is_put_off(third, running)
    assert not burst.is_put_off(third, [first, second]), "no answer streams beside them"
    burst.world.reuse.repairs.repair(first, torch.arange(500, 700, dtype=torch.int32))
    assert not burst.is_put_off(third, running), "the step has come"
    plain = FakeRequest("plain", make_tokens(50))
    assert not burst.is_put_off(plain, running, num_rows=1000), "it has nothing to repair"


def test_repairs_before_first_tokens_count_in_the_step_that_admits_them(make_world, make_tokens):
    burst = Burst(make_world, make_tokens, repair="before")
    burst.world.reuse.repairs.most_rows = 70
    req = burst.reqs[0]
    assert not burst.is_put_off(req, [burst.stream])
    assert burst.world.reuse.repairs.rows_now(req) == 30
    assert not burst.is_put_off(req, [burst.stream], num_rows=30)
    assert burst.is_put_off(req, [burst.stream], num_rows=60)


def test_repair_that_alone_is_too_much_for_a_step_has_one_of_its_own(make_world, make_tokens):
    burst = Burst(make_world, make_tokens)
    burst.world.reuse.repairs.most_rows = 10
    assert not burst.is_put_off(burst.reqs[0], [burst.stream])
    burst.admit(burst.reqs[0])
    assert burst.is_put_off(burst.reqs[1], [burst.stream])


def test_no_selection_has_no_repair(ask):
    asked = ask(selection="none")
    asked.world.reuse.repairs.passes.recomputer = None
    asked.prefill().draw()
    assert asked.world.reuse.repairs.due([asked.req]) == [], "no step is held up"
    assert asked.told()["repair"] is None


# What it computes


class Whole(Case):
    """The case with its tail computed over the copies, as SGLang computes it, in slots of its own."""

    def __init__(self, **shape):
        super().__init__(**shape)
        free = np.setdiff1d(np.arange(1, SLOTS), self.slots.numpy())
        self.slots = torch.cat([self.slots, torch.from_numpy(free[: len(self.tokens) - self.front])])

    def compute(self, rows):
        made = self.made(None, None)
        made.in_step(lambda: self.decoder.run(self.tokens[rows], rows, self.over(rows)), RuntimeError)

    def over(self, rows):
        from kvgraft.integrations.sglang.recompute.slot_attention import PromptKV

        return Recomputation(PromptKV(self.buffers, self.slots), rows, None)

    def made(self, policy, correction):
        return Recomputer(self.decoder, self.buffers, policy, correction, Ranks())

    @property
    def live(self):
        return self.plan.compute[self.plan.compute >= self.runs[0][1]]


@pytest.mark.parametrize("policy", [FirstK(4), QuerySeam(ratio=0.2)], ids=["first_k", "query_seam"])
@pytest.mark.parametrize("correction", [None, DriftCorrection()], ids=["as copied", "corrected"])
def test_kv_are_those_of_a_repair_before_the_first_token(policy, correction):
    before, after = Whole(tail=40), Whole(tail=40)
    done = before.made(policy, correction).run(before.tokens, before.plan, before.slots[: before.front], policy)
    before.compute(np.arange(before.front, len(before.tokens)))
    for rows in np.split(after.live, [8]):  # the gap, then the tail, over the copies
        after.compute(rows)
    after.decoder.runs.clear()
    found = after.made(policy, correction).repair(after.tokens, after.plan, after.slots, policy)
    assert (found.recomputed_runs, found.num_corrected) == (done.recomputed_runs, done.num_corrected)
    assert len(after.decoder.runs) == (2 if isinstance(policy, QuerySeam) else 1)
    for layer in range(LAYERS):
        assert torch.allclose(before.keys[layer][before.slots], after.keys[layer][after.slots], atol=1e-4)
        assert torch.allclose(before.values[layer][before.slots], after.values[layer][after.slots], atol=1e-4)


def test_repair_writes_nothing_before_the_first_chosen_token(ask):
    """Rows of the query before the first copy may lie in slots that the exact tree shares."""
    case = Whole(tail=9)
    for rows in np.split(case.live, [8]):
        case.compute(rows)
    case.before = case.snapshot()
    policy = QuerySeam(ratio=0.2)
    found = case.made(policy, None).repair(case.tokens, case.plan, case.slots, policy)
    first = found.recomputed_runs[0][0]
    for layer in range(LAYERS):
        assert min(case.changed(layer), default=first) >= min(first, case.runs[0][0]) == 10


def test_policy_that_fails_is_raised_after_the_first_token_too():
    class Failing(FirstK):
        def steps(self, context):
            yield from super().steps(context)
            raise ValueError("no second step")

    case = Whole(tail=40)
    with pytest.raises(PolicyError, match="no second step"):
        case.made(Failing(4), None).repair(case.tokens, case.plan, case.slots, Failing(4))


def test_rank_whose_pass_fails_has_all_of_them_fail():
    case = Whole(tail=40)

    other = FailsElsewhere(lambda: bool(case.decoder.runs))
    made = Recomputer(case.decoder, case.buffers, FirstK(4), None, other)
    with pytest.raises(RuntimeError, match="another rank"):
        made.repair(case.tokens, case.plan, case.slots, FirstK(4))
    assert len(case.decoder.runs) == 1


@pytest.mark.parametrize(
    ("stock", "last_batch", "due", "wanted"),
    [
        (False, "prefill", ["req"], True),
        (False, "prefill", [], False),
        (False, None, ["req"], False),  # nothing is left whose result could come
        (True, "prefill", [], True),
    ],
)
def test_first_token_is_sent_before_its_request_is_repaired(stock, last_batch, due, wanted):
    cache = SimpleNamespace(reuse=object(), repairs_due=lambda batch: due if batch == "decode" else None)
    scheduler = SimpleNamespace(tree_cache=cache)
    assert _early_results(stock, scheduler, "decode", last_batch=last_batch) is wanted


def test_servers_without_reuse_keep_their_order():
    assert _early_results(False, SimpleNamespace(tree_cache=object()), "decode", last_batch="prefill") is False
