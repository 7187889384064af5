"""The exact bound and the exact prefixes against the plainest possible methods."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.bench.bound import PrefixSet, covered_positions


def make_prompts(seed, vocabulary):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, int(rng.integers(0, 60)), dtype=np.int32) for _ in range(8)]


def expected_coverage(prompts, min_run):
    seen, result = set(), []
    for prompt in prompts:
        grams = [tuple(prompt[i : i + min_run].tolist()) for i in range(len(prompt) - min_run + 1)]
        covered = {i + j for i, gram in enumerate(grams) if gram in seen for j in range(min_run)}
        result.append([i in covered for i in range(len(prompt))])
        seen.update(grams)
    return result


@pytest.mark.parametrize("min_run", [1, 2, 3, 4, 5, 7, 8, 13, 16])
@pytest.mark.parametrize("vocabulary", [1, 2, 5])
def test_covered_positions_agree_with_a_table_of_grams(min_run, vocabulary):
    for seed in range(6):
        prompts = make_prompts(seed, vocabulary)
        found = [covered.tolist() for covered in covered_positions(prompts, min_run)]
        assert found == expected_coverage(prompts, min_run)


def test_runs_do_not_cross_prompts_and_do_not_count_within_one():
    text = np.arange(20, dtype=np.int32)
    halves = covered_positions([text[:10], text[10:], text], 12)
    assert not any(covered.any() for covered in halves)
    twice = covered_positions([np.concatenate([text, text])], 16)
    assert not twice[0].any()


def test_first_prompt_is_never_covered_and_its_copy_is():
    text = np.arange(50, dtype=np.int32)
    first, second = covered_positions([text, text], 32)
    assert not first.any()
    assert second.all()


@pytest.mark.parametrize("prompts", [[], [np.empty(0, np.int32)], [np.arange(5, dtype=np.int32)]])
def test_too_little_text_has_no_coverage(prompts):
    assert [covered.tolist() for covered in covered_positions(prompts, 16)] == [[False] * len(p) for p in prompts]


@pytest.mark.parametrize("vocabulary", [2, 300, 2**31 - 1])
def test_longest_prefix_agrees_with_comparing_all(vocabulary):
    rng = np.random.default_rng(0)
    prefixes, earlier = PrefixSet(), []
    for _ in range(200):
        tail = rng.integers(0, vocabulary, int(rng.integers(0, 12)), dtype=np.int32)
        base = earlier[int(rng.integers(len(earlier)))] if earlier else tail
        prompt = np.concatenate([base[: int(rng.integers(0, 12))], tail])
        expected = max((common_prefix(prompt, other) for other in earlier), default=0)
        assert prefixes.longest_prefix(prompt) == expected
        prefixes.add(prompt)
        earlier.append(prompt)


def common_prefix(a, b):
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length
