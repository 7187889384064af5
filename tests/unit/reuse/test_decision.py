"""A decision is whole: a graft with a donor and a tier of each span, or a miss that reuses the prefix alone."""

import dataclasses

import numpy as np
import pytest

from kvgraft.donors import Donor
from kvgraft.graft.select import FirstK
from kvgraft.reuse.decision import Decision, Sampled
from kvgraft.types import (
    DonorId,
    GraftPlan,
    Match,
    Miss,
    MissReason,
    Namespace,
    RiskStatement,
    RiskStatus,
    Substitution,
)

SPANS = (Match(10, DonorId(1), 0, 20), Match(40, DonorId(2), 5, 20))
DONORS = tuple(Donor(DonorId(number), Namespace("model"), np.arange(30, dtype=np.int32), None) for number in (1, 2))
MISS = Miss(MissReason.NO_ROOM, "too little")
CERTIFIED = RiskStatement(RiskStatus.CERTIFIED, notch="first_k")


def make_graft(**changes):
    fields = {
        "plan": GraftPlan.over(100, 4, SPANS),
        "donors": DONORS,
        "tiers": ("device", "host"),
        "policy": FirstK(8),
        "risk": CERTIFIED,
        "sampled": Sampled("moved", 1),
    }
    return Decision(**fields | changes)


def test_spans_name_donor_and_tier():
    assert list(make_graft().spans()) == [(SPANS[0], DONORS[0], "device"), (SPANS[1], DONORS[1], "host")]


OTHER = Substitution("other", {})


@pytest.mark.parametrize("changes", [{}, {"substitution": OTHER}], ids=["equal text", "other text"])
def test_what_is_given_up_keeps_nothing_of_the_graft_but_policy_and_risk(changes):
    given_up = make_graft(**changes).given_up(MISS)
    assert given_up.miss == MISS
    assert (given_up.plan.spans, given_up.donors, given_up.tiers) == ((), (), ())
    assert given_up.plan.compute.tolist() == list(range(4, 100))
    assert (given_up.sampled, given_up.substitution) == (None, None)
    assert (given_up.policy, given_up.risk) == (FirstK(8), CERTIFIED)


@pytest.mark.parametrize(
    "changes",
    [
        {"donors": DONORS[:1]},
        {"tiers": ()},
        {"miss": MISS},
        {"plan": GraftPlan.over(100, 4), "donors": (), "tiers": ()},
        {"plan": GraftPlan.over(100, 4), "donors": (), "tiers": (), "miss": MISS, "substitution": OTHER},
    ],
    ids=["a donor is missing", "no tiers", "a miss with spans", "neither graft nor miss", "a miss that is substituted"],
)
def test_halves_of_decisions_are_refused(changes):
    with pytest.raises(AssertionError):
        make_graft(**changes)


def test_fields_cannot_be_patched():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_graft().miss = MISS
