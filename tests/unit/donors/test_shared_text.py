"""Text that many donors share and continue differently: what is found, against the best that any choice could find."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from benchmarks.shared_text import SHARED_TEXT, Forms

from kvgraft.bench.bound import covered_positions
from kvgraft.donors import GUARANTEED_RUN, DonorCatalogue, DonorQuery
from kvgraft.types import Namespace

# No key is better than another; the rest of them are tried where there is time.
KEYS = ("", *(pytest.param(key, marks=pytest.mark.slow) for key in ("tenant", "another")))


def replay(prompts, key, *, min_run, capacity=None):
    """Look every prompt up, then add it; yields prompt, mask of the tokens that were found, catalogue."""
    namespace = Namespace("model", tenant_salt=key)
    secret = hashlib.sha256(key.encode()).digest()
    catalogue = DonorCatalogue(capacity or sum(map(len, prompts)), min_run=min_run, secret=secret)
    for prompt in prompts:
        found = np.zeros(len(prompt), np.bool_)
        for match in catalogue.find(DonorQuery(namespace, prompt)):
            target = slice(match.target_start, match.target_end)
            donor = catalogue.get(match.donor_id).token_ids
            assert np.array_equal(donor[match.donor_start : match.donor_start + match.length], prompt[target])
            assert not found[target].any()
            assert match.length >= min_run
            found[target] = True
        yield prompt, found, catalogue
        catalogue.add(namespace, prompt, None)
    catalogue.check()


def longest_runs(prompt, donors):
    """For each position, how long a run from there on some donor has at most; every pair of tokens is compared."""
    longest = np.zeros(len(prompt) + 1, np.int64)
    for donor in donors:
        following = np.zeros(len(donor) + 1, np.int64)
        for position in range(len(prompt) - 1, -1, -1):
            following[:-1] = np.where(donor == prompt[position], following[1:] + 1, 0)
            longest[position] = max(longest[position], following.max())
    return longest


def most_tokens(longest, min_run):
    """Most tokens that disjoint pieces of runs can have, by trying every length of every piece."""
    most = np.zeros(len(longest), np.int64)
    for start in range(len(longest) - 2, -1, -1):
        most[start] = most[start + 1]
        if longest[start] >= min_run:
            lengths = np.arange(min_run, longest[start] + 1)
            most[start] = max(most[start], int((lengths + most[start + lengths]).max()))
    return int(most[0])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", SHARED_TEXT)
def test_all_but_a_hundredth_of_shared_runs_is_found_under_any_key(name, key):
    prompts = SHARED_TEXT[name](150, len(key))
    covered = covered_positions(prompts, GUARANTEED_RUN)
    masks = [found for _, found, _ in replay(prompts, key, min_run=16)]
    pairs = list(zip(masks, covered, strict=True))
    assert sum(int((found & bound).sum()) for found, bound in pairs) >= 0.99 * sum(
        int(bound.sum()) for _, bound in pairs
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", SHARED_TEXT)
@pytest.mark.parametrize("min_run", [32, pytest.param(50, marks=pytest.mark.slow)])
def test_long_pieces_cover_all_but_a_hundredth_of_what_any_choice_could(name, key, min_run):
    prompts = SHARED_TEXT[name](100, 7 + len(key))
    total = bound = 0
    for index, (prompt, found, _) in enumerate(replay(prompts, key, min_run=min_run)):
        if index % 33 == 32:
            total += int(found.sum())
            bound += most_tokens(longest_runs(prompt, prompts[:index]), min_run)
    assert total >= 0.99 * bound


@pytest.mark.parametrize("share", [3, 10])
def test_shared_runs_are_found_while_donors_leave(share):
    prompts = Forms().prompts(300, 3)
    total = bound = 0
    for index, (prompt, found, catalogue) in enumerate(
        replay(prompts, "", min_run=16, capacity=sum(map(len, prompts)) // share)
    ):
        if index % 20 == 19:
            covered = covered_positions([*(donor.token_ids for donor in catalogue), prompt], GUARANTEED_RUN)[-1]
            total += int((found & covered).sum())
            bound += int(covered.sum())
    assert total >= 0.98 * bound


def test_prompts_of_a_pack_are_those_of_its_seed():
    for name, prompts in SHARED_TEXT.items():
        first, again, other = prompts(3, 1), prompts(3, 1), prompts(3, 2)
        assert all(map(np.array_equal, first, again)), name
        assert not all(map(np.array_equal, first, other)), name
