"""Donors that somebody names: found although the indexes lost them, compared like all others; and who hears of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.donors.fingerprint import GUARANTEED_RUN
from kvgraft.types import DonorId, Match, Namespace

NAMESPACE, OTHER = Namespace("model"), Namespace("model", tenant_salt="other")
TEXT = np.random.default_rng(0).integers(0, 30_000, 500)
PROMPT = np.concatenate([np.arange(40_000, 40_033), TEXT[100:400], np.arange(50_000, 50_020)])


def forgetful(*texts, namespace=NAMESPACE, generation=0):
    """A catalogue whose indexes have lost every anchor, and the ids of its donors."""
    catalogue = DonorCatalogue(20_000)
    ids = [catalogue.add(namespace, text, None, generation=generation).donor.donor_id for text in texts]
    catalogue.finder.index.clear()
    catalogue.finder.passages.clear()
    catalogue.check()
    return catalogue, ids


def test_displaced_donor_is_found_when_it_is_proposed():
    catalogue, (donor_id,) = forgetful(TEXT)
    assert catalogue.find(DonorQuery(NAMESPACE, PROMPT)) == []
    assert catalogue.find(DonorQuery(NAMESPACE, PROMPT, proposed=[donor_id, donor_id])) == [
        Match(33, donor_id, 100, 300)
    ]
    assert catalogue.find(DonorQuery(NAMESPACE, PROMPT, proposed=[donor_id], start=100)) == [
        Match(100, donor_id, 167, 233)
    ]
    catalogue.check()


def test_what_does_not_match_proposes_nothing():
    catalogue, (donor_id,) = forgetful(TEXT)
    assert catalogue.find(DonorQuery(NAMESPACE, TEXT[::-1], proposed=[donor_id])) == []


def test_tokens_are_compared_although_the_donor_was_named():
    """One token differs in the middle of what the anchors say is the same."""
    prompt = PROMPT.copy()
    prompt[183] += 1
    catalogue, (donor_id,) = forgetful(TEXT)
    matches = catalogue.find(DonorQuery(NAMESPACE, prompt, proposed=[donor_id]))
    assert matches == [Match(33, donor_id, 100, 150), Match(184, donor_id, 251, 149)]


@pytest.mark.parametrize("asked", [OTHER, Namespace("other model"), Namespace("model", "adapter")])
def test_a_donor_of_another_namespace_is_never_used(asked):
    catalogue, (donor_id,) = forgetful(TEXT)
    catalogue.add(asked, TEXT[:50], None)
    found = catalogue.find(DonorQuery(asked, PROMPT, proposed=[donor_id]))
    assert donor_id not in {match.donor_id for match in found}
    assert found == catalogue.find(DonorQuery(asked, PROMPT))


def test_donors_that_are_gone_or_of_too_high_a_generation_are_ignored():
    catalogue, (donor_id,) = forgetful(TEXT, generation=2)
    assert catalogue.find(DonorQuery(NAMESPACE, PROMPT, proposed=[donor_id], max_generation=1)) == []
    assert len(catalogue.find(DonorQuery(NAMESPACE, PROMPT, proposed=[donor_id], max_generation=2))) == 1
    catalogue.remove(donor_id)
    catalogue.add(NAMESPACE, TEXT[::-1], None)
    assert catalogue.find(DonorQuery(NAMESPACE, PROMPT, proposed=[donor_id, DonorId(12345)])) == []


@pytest.mark.parametrize("seed", range(12))
def test_every_long_run_of_proposed_donors_is_found(seed):
    """Against a comparison of every offset: prompts of pieces, repeats and periods."""
    rng = np.random.default_rng(seed)
    donors = [rng.integers(0, 2_000, 400) for _ in range(3)]
    donors.append(np.tile(rng.integers(0, 2_000, rng.integers(3, 60)), 12))
    pieces = [donor[a : a + rng.integers(20, 90)] for donor in donors for a in rng.integers(0, 250, 3)]
    prompt = np.concatenate(
        [part for i in rng.permutation(len(pieces)) for part in (pieces[i], rng.integers(3_000, 4_000, 7))]
    )
    catalogue, ids = forgetful(*donors)
    found = catalogue.find(DonorQuery(NAMESPACE, prompt, proposed=ids))
    covered = np.zeros(len(prompt), bool)
    for match in found:
        own = donors[ids.index(match.donor_id)]
        target = slice(match.target_start, match.target_end)
        np.testing.assert_array_equal(prompt[target], own[match.donor_start : match.donor_start + match.length])
        covered[target] = True
    wanted = np.zeros(len(prompt), bool)
    for donor in donors:
        windows = {donor[i : i + GUARANTEED_RUN].tobytes() for i in range(len(donor) - GUARANTEED_RUN + 1)}
        for i in range(len(prompt) - GUARANTEED_RUN + 1):
            if prompt[i : i + GUARANTEED_RUN].tobytes() in windows:
                wanted[i : i + GUARANTEED_RUN] = True
    assert wanted.any()
    assert not (wanted & ~covered).any()


@pytest.mark.parametrize("seed", range(6))
def test_with_its_indexes_whole_proposals_change_no_coverage(seed):
    rng = np.random.default_rng(seed)
    donors = [rng.integers(0, 2_000, 400) for _ in range(4)]
    catalogue = DonorCatalogue(20_000)
    ids = [catalogue.add(NAMESPACE, donor, None).donor.donor_id for donor in donors]
    prompt = np.concatenate(
        [donors[i][a : a + 100] for i, a in zip(rng.permutation(4), rng.integers(0, 300, 4), strict=True)]
    )
    alone = catalogue.find(DonorQuery(NAMESPACE, prompt))
    helped = catalogue.find(DonorQuery(NAMESPACE, prompt, proposed=ids))
    assert sum(match.length for match in helped) == sum(match.length for match in alone)


class Watcher:
    def __init__(self):
        self.heard = []

    def donor_added(self, donor, before):
        self.heard.append(("added", donor.donor_id))

    def donor_removed(self, donor):
        self.heard.append(("removed", donor.donor_id))

    def donors_reset(self):
        self.heard.append("reset")


def test_watchers_hear_of_everything_that_comes_and_goes():
    catalogue, watcher = DonorCatalogue(1_000), Watcher()
    catalogue.watch(watcher)
    first = catalogue.add(NAMESPACE, TEXT, None).donor.donor_id
    catalogue.add(NAMESPACE, TEXT[:3], None)
    second, (evicted,) = catalogue.add(NAMESPACE, np.append(TEXT, TEXT)[:900], None)
    assert evicted.donor_id == first
    catalogue.remove(second.donor_id)
    catalogue.reset()
    assert watcher.heard == [
        ("added", first),
        ("removed", first),
        ("added", second.donor_id),
        ("removed", second.donor_id),
        "reset",
    ]
