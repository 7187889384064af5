"""How many positions a graft will compute decides whether a request waits for it, or its engine step does."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvgraft.config import VLLMConfig
from kvgraft.donors import DonorCatalogue, plan_graft
from kvgraft.errors import PolicyError
from kvgraft.graft.select import FirstK, KVDeviation, NoRecompute, QuerySeam
from kvgraft.integrations.vllm.messages import GraftOutcome
from kvgraft.integrations.vllm.scheduler import EngineFacts
from kvgraft.integrations.vllm.scheduler.claims import Claim, Claims
from kvgraft.reuse.failures import miss_of
from kvgraft.types import GraftPlan, MissReason, Namespace

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
    reports_failed_loads=True,
    refusal="",
)


@pytest.mark.parametrize(
    ("policy", "num_rows"),
    [
        (NoRecompute(), 30),
        (FirstK(16), 30 + 16),
        (KVDeviation(0.1), 30 + 200),  # every position, in the first layers
        (QuerySeam(0.1), 30 + 20 + 70),  # what stands behind the graft is run to look at it
    ],
)
def test_rows_that_workers_run_are_known_beforehand(policy, num_rows):
    catalogue = DonorCatalogue(1000)
    catalogue.add(NAMESPACE, np.array(DOCUMENT), None)
    prompt = np.array(FRONT + DOCUMENT + TAIL)
    matches = catalogue.find(NAMESPACE, prompt)
    plan = plan_graft(len(prompt), 0, matches)
    assert isinstance(plan, GraftPlan)
    for limit, waits in ((num_rows, False), (num_rows - 1, True)):
        config = VLLMConfig(max_recompute_tokens_per_step=limit)
        claim = Claims(config, FACTS, policy, catalogue).of(plan, matches)
        assert isinstance(claim, Claim)
        assert claim.end == 230
        assert claim.asynchronous is waits


class Failing(FirstK):
    def steps(self, context):
        raise ValueError("no steps")


def test_a_policy_that_fails_is_no_claim():
    catalogue = DonorCatalogue(1000)
    catalogue.add(NAMESPACE, np.array(DOCUMENT), None)
    prompt = np.array(FRONT + DOCUMENT + TAIL)
    matches = catalogue.find(NAMESPACE, prompt)
    plan = plan_graft(len(prompt), 0, matches)
    with pytest.raises(PolicyError, match="no steps") as caught:
        Claims(VLLMConfig(), FACTS, Failing(), catalogue).of(plan, matches)
    assert miss_of(caught.value).reason is MissReason.POLICY_ERROR


def test_the_outcome_of_a_policy_that_failed_on_one_rank_is_that_of_all():
    mine, other = GraftOutcome(((5, 3),), 1.0, 1.0), GraftOutcome((), 0.0, 0.0, "no", failed=True, is_policy_error=True)
    assert mine.worst(other).is_policy_error
    assert other.worst(mine).failed
