"""How many positions a graft will compute decides whether a request waits for it, or its engine step does."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvgraft.config import VLLMConfig
from kvgraft.donors import DonorCatalogue, DonorQuery, plan_graft
from kvgraft.errors import PolicyError
from kvgraft.graft.select import FirstK, KVDeviation, NoRecompute, QuerySeam
from kvgraft.integrations.vllm.scheduler import EngineFacts
from kvgraft.integrations.vllm.scheduler.claims import Claims
from kvgraft.integrations.vllm.scheduler.decisions import costs_of
from kvgraft.reuse.claim import Claim
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.outcome import GraftOutcome
from kvgraft.reuse.repair_time import CONSTRAINED, RepairPlan
from kvgraft.types import Fidelity, GraftPlan, MissReason, Namespace, RepairTime

NAMESPACE = Namespace("model")
DOCUMENT = random.Random(1).choices(range(1000), k=200)
FRONT, TAIL = [1001] * 30, [1002] * 70
FACTS = EngineFacts(
    fingerprint="model",
    block_sizes=(16,),
    hash_block_size=16,
    window=0,
    capacity_tokens=1000,
    hidden_size=64,
    output_chunk=8,
    refusal="",
)


PROMPT = np.array(FRONT + DOCUMENT + TAIL)


def planned(policy, **options):
    """Claims under a policy, and the plan of a prompt with `DOCUMENT` in it and its matches."""
    catalogue = DonorCatalogue(1000)
    catalogue.add(NAMESPACE, np.array(DOCUMENT), None)
    matches = catalogue.find(DonorQuery(NAMESPACE, PROMPT))
    plan = plan_graft(len(PROMPT), 0, matches)
    assert isinstance(plan, GraftPlan)
    own = [name for name in ("window", "block_sizes", "takes_running_back") if name in options]
    facts = replace(FACTS, **{name: options.pop(name) for name in own})
    return Claims(VLLMConfig(**options), facts, policy, catalogue, lambda _: "host"), plan, matches


def time_of(claims, plan, time, *, max_tokens=9, generated=0, **asked):
    return claims.repair_times.of(plan, PROMPT, time, max_tokens=max_tokens, num_generated=generated, **asked)


def test_a_constrained_answer_waits_for_its_repair():
    claims, plan, _ = planned(QuerySeam(0.1))
    assert time_of(claims, plan, RepairTime.AFTER, is_constrained=True) == RepairPlan(RepairTime.BEFORE, CONSTRAINED)
    assert time_of(claims, plan, RepairTime.BEFORE, is_constrained=True) == RepairPlan(RepairTime.BEFORE)


def test_rows_of_a_repair_that_may_come_at_once_count_with_those_of_the_graft():
    found = []
    for margin in (0.0, 0.25):
        claims, plan, matches = planned(QuerySeam(0.1), repair_below_margin=margin)
        claim = claims.of(plan, PROMPT, matches, repair=RepairPlan(RepairTime.AFTER))
        found.append((claim.num_rows, claim.num_repair_rows))
    (alone, repair), (both, again) = found
    assert repair == again > 0
    assert both == alone + repair


@pytest.mark.parametrize(
    ("policy", "num_rows"),
    [
        (NoRecompute(), 30),
        (FirstK(16), 30 + 16),
        (KVDeviation(0.1), 30 + 200),  # every position, in the first layers
        (QuerySeam(0.1), 30 + 70 + 20 + 64),  # the question, what is chosen by it, and the question's rows once more
    ],
)
def test_rows_that_workers_run_are_known_beforehand(policy, num_rows):
    for limit, waits in ((num_rows, False), (num_rows - 1, True)):
        claims, plan, matches = planned(policy, max_recompute_tokens_per_step=limit)
        repair = time_of(claims, plan, RepairTime.BEFORE)
        claim = claims.of(plan, PROMPT, matches, repair=repair)
        assert isinstance(claim, Claim)
        assert claim.asynchronous is waits
        assert not claim.repairs_after


@pytest.mark.parametrize("load", ["sync", "auto"])
def test_a_request_waits_for_its_graft_where_vllm_sets_no_running_one_back(load):
    for takes_back in (True, False):
        claims, plan, matches = planned(NoRecompute(), load=load, takes_running_back=takes_back)
        assert claims.of(plan, PROMPT, matches).asynchronous is not takes_back


@pytest.mark.parametrize(
    ("policy", "num_rows"),
    [
        (FirstK(16), 16 + 64),
        (KVDeviation(0.1), 300),
        (QuerySeam(0.1), 20 + 64),  # the question is computed after what is chosen
    ],
)
def test_a_repair_that_fits_into_a_step_comes_after_the_first_token(policy, num_rows):
    for limit in (num_rows, num_rows - 1):
        claims, plan, matches = planned(policy, max_recompute_tokens_per_step=limit)
        repair = time_of(claims, plan, RepairTime.AFTER)
        claim = claims.of(plan, PROMPT, matches, repair=repair)
        assert isinstance(claim, Claim)
        if limit == num_rows:
            assert repair == RepairPlan(RepairTime.AFTER)
            assert claim.repairs_after
            assert claim.asynchronous is (claim.num_rows > limit)
        else:
            reason = f"it takes {num_rows} rows in one step, more than max_recompute_tokens_per_step={limit}"
            assert repair == RepairPlan(RepairTime.BEFORE, reason)


@pytest.mark.parametrize(
    ("asked", "engine", "reason"),
    [
        ({"max_tokens": 1}, {}, "one token was asked for"),
        ({"generated": 3}, {}, "vLLM began the request again after its first token"),
        ({}, {"window": 128}, "vLLM has given blocks of sliding windows back by then"),
        ({}, {"block_sizes": (16, 16)}, "of a model with several KV cache groups vLLM takes no failed repair back"),
    ],
)
def test_what_forbids_a_repair_after_the_first_token_is_named(asked, engine, reason):
    claims, plan, _ = planned(FirstK(16), **engine)
    repair = time_of(claims, plan, RepairTime.AFTER, **asked)
    assert repair == RepairPlan(RepairTime.BEFORE, reason)
    as_asked = time_of(claims, plan, RepairTime.BEFORE, **asked)
    assert as_asked == RepairPlan(RepairTime.BEFORE), "what was asked for needs no reason"


def test_a_question_is_run_once_more_after_what_is_chosen_by_it():
    _, plan, _ = planned(QuerySeam(0.1))
    costs = costs_of(FACTS, QuerySeam(0.1))
    long = replace(plan, num_tokens=1230, compute=np.append(plan.compute, np.arange(300, 1230)))
    assert costs.look_cost(long) == costs.compute_cost(1230 - 64, 1230)
    assert costs_of(FACTS, NoRecompute()).look_cost(long) == 0


@pytest.mark.parametrize("time", list(RepairTime))
@pytest.mark.parametrize("num_after", [1, 2, 256, 257, 900])
def test_workers_compute_the_question_that_they_look_at(time, num_after):
    """All but its last token; a long text is left to vLLM where the look may come later."""
    claims, _, matches = planned(QuerySeam(0.1))
    tokens = np.append(PROMPT[:230], [1002] * num_after)
    plan = plan_graft(len(tokens), 0, matches)
    claim = claims.of(plan, tokens, matches, repair=RepairPlan(time))
    is_left = time is RepairTime.AFTER and num_after > 256
    assert claim.end == (230 if is_left else 230 + num_after - 1)
    num_looks = 1 + is_left
    assert claim.num_repair_rows == (20 + num_looks * min(64, 30 + num_after) if time is RepairTime.AFTER else 0)
    for policy, repair in (
        (QuerySeam(0.1), None),
        (FirstK(16), RepairPlan(time)),
        (KVDeviation(0.1), RepairPlan(time)),
    ):
        claims, _, _ = planned(policy)
        assert claims.of(plan, tokens, matches, repair=repair).end == 230, "nothing looks at it"


def test_a_policy_that_chooses_nothing_repairs_nothing():
    claims, plan, _ = planned(NoRecompute())
    assert time_of(claims, plan, RepairTime.AFTER) is None
    claims, plan, _ = planned(FirstK(16))
    exact = replace(plan, spans=tuple(replace(span, fidelity=Fidelity.EXACT) for span in plan.spans))
    assert time_of(claims, exact, RepairTime.AFTER) is None


class Failing(FirstK):
    def steps(self, context):
        raise ValueError("no steps")


@pytest.mark.parametrize("time", list(RepairTime))
def test_a_policy_that_fails_is_no_claim(time):
    claims, plan, matches = planned(Failing())
    with pytest.raises(PolicyError, match="no steps") as caught:
        claims.of(plan, PROMPT, matches, repair=time_of(claims, plan, time))
    assert miss_of(caught.value).reason is MissReason.POLICY_ERROR


def test_the_outcome_of_a_policy_that_failed_on_one_rank_is_that_of_all():
    mine, other = GraftOutcome(((5, 3),), 1.0, 1.0), GraftOutcome((), 0.0, 0.0, "no", failed=True, is_policy_error=True)
    assert mine.worst(other).is_policy_error
    assert other.worst(mine).failed
