"""Matching: runs are maximal and verified, and work stays in proportion to the prompt whatever the texts are."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors.anchors import AnchorIndex
from kvgraft.donors.arena import TokenArena
from kvgraft.donors.fingerprint import GUARANTEED_RUN, Anchors, Fingerprinter
from kvgraft.donors.matcher import Passages, find_runs
from kvgraft.donors.passages import PassageIndex
from kvgraft.donors.verify import Verifier

PROMPT_TOKENS = 32_768


def make_text(length, *, seed=0, vocabulary=30_000):
    return np.random.default_rng(seed).integers(0, vocabulary, length, dtype=np.int32)


def join(*parts):
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def match(donors, prompt, *, lowest=0, index=None):
    """Runs of `prompt` as (start, end, row, donor start), and the verifier."""
    size = sum(map(len, donors))
    arena, index = TokenArena(size, len(donors)), index or AnchorIndex.for_tokens(size)
    fingerprinter, passages = Fingerprinter(b"key", bytes(32)), PassageIndex(size, len(donors), GUARANTEED_RUN)
    for row, donor in enumerate(donors):
        arena.store(row, donor)
        passages.insert(index.insert(row, fingerprinter.anchors(donor)).crowded_out, arena, fingerprinter)
    verifier = Verifier(prompt, arena, lowest=lowest)
    hashes, positions = fingerprinter.anchors(prompt[lowest:])

    def passages_at(starts):
        return passages.lookup(fingerprinter.passages(prompt, GUARANTEED_RUN)[starts])

    hits = index.lookup(hashes)
    crowded = positions[hits.query[1:][hits.query[1:] == hits.query[:-1]]] + lowest
    wanted = Passages(GUARANTEED_RUN, lowest, crowded, passages_at)
    runs = find_runs(Anchors(hashes, positions + lowest), hits, wanted, arena, verifier)
    donor_starts = runs.starts + runs.diagonals - arena.starts[runs.rows]
    columns = (runs.starts, runs.ends, runs.rows, donor_starts)
    found = sorted(set(zip(*(column.tolist() for column in columns), strict=True)))
    for start, end, row, donor_start in found:
        assert end - start >= 16
        assert np.array_equal(prompt[start:end], donors[row][donor_start : donor_start + end - start])
    return found, verifier


def coverage(found):
    return len({position for start, end, *_ in found for position in range(start, end)})


def test_run_is_extended_to_the_first_unequal_tokens():
    document = make_text(1_000)
    prompt = join([-1], document[200:500], [-2])
    assert match([document], prompt)[0] == [(1, 301, 0, 200)]


def test_whole_donor_inside_a_prompt_and_whole_prompt_inside_a_donor():
    short, long = make_text(300), join(make_text(77, seed=1), make_text(300), make_text(50, seed=2))
    assert match([short], long)[0] == [(77, 377, 0, 0)]
    assert match([long], short)[0] == [(0, 300, 0, 77)]


def test_run_does_not_reach_into_the_next_donor():
    text = make_text(400)
    assert match([text[:200], text[200:]], text)[0] == [(0, 200, 0, 0), (200, 400, 1, 0)]


def edited(document, cuts, lengths):
    """The document with the token before each cut gone, and so many new ones in its place."""
    pieces, begin = [], 0
    for cut, length in zip(cuts, lengths, strict=True):
        pieces += [document[begin : cut - 1], 40_000 + np.arange(cut, cut + length)]
        begin = cut
    return join(*pieces, document[begin:])


@pytest.mark.parametrize("lengths", [[1] * 6, [0] * 6, [2] * 6, [4, 0, 1, 0, 3, 2]], ids=str)
@pytest.mark.parametrize("side", ["after", "before"])
def test_short_runs_between_edits_are_found_from_a_long_one(lengths, side):
    """An answer that a client tokenises anew differs by a token here and there, and half of what is between is short."""
    gap = 18
    cuts = 60 + (gap + 1) * np.arange(1, 7)
    document = make_text(60 + (gap + 1) * 6 + gap)
    if side == "before":
        document, cuts = document[::-1].copy(), np.sort(len(document) - cuts + 1)
    prompt = edited(document, cuts.tolist(), lengths)
    found, _ = match([document], join(make_text(50, seed=1), prompt, make_text(50, seed=2)))
    assert coverage(found) == len(document) - len(cuts)


def test_text_beside_a_run_that_is_another_is_not_taken_for_it():
    document = make_text(200)
    prompt = join(document[:100], make_text(400, seed=1))
    assert match([document], prompt)[0] == [(0, 100, 0, 0)]


def test_edited_token_splits_a_run():
    document = make_text(600)
    prompt = document.copy()
    prompt[300] += 1
    assert match([document], prompt)[0] == [(0, 300, 0, 0), (301, 600, 0, 301)]


def test_inserted_token_changes_the_diagonal():
    document = make_text(600)
    assert match([document], join(document[:300], [-1], document[300:]))[0] == [(0, 300, 0, 0), (301, 601, 0, 300)]


def test_passages_in_another_order_are_all_found():
    passages = [make_text(150, seed=seed) for seed in range(8)]
    found, _ = match([join(*passages)], join(*reversed(passages)))
    assert [(start, end) for start, end, *_ in found] == [(150 * i, 150 * i + 150) for i in range(8)]


def test_passage_repeated_in_the_prompt_is_found_each_time():
    passage = make_text(100)
    prompt = join(*(part for seed in range(20) for part in (passage, make_text(40, seed=seed + 1))))
    found, _ = match([passage], prompt)
    assert [(start, end) for start, end, *_ in found] == [(140 * i, 140 * i + 100) for i in range(20)]


def test_repeat_is_found_where_a_longer_run_hides_most_of_it():
    head, passage, tail = make_text(60, seed=1), make_text(80, seed=2), make_text(6, seed=3)
    prompt = join(passage, [-1], head, passage, tail)
    found, _ = match([join(head, passage), join(passage, tail)], prompt)
    assert (141, 227, 1, 0) in found


def test_runs_do_not_reach_below_the_lowest_position():
    document = make_text(500)
    assert match([document], document, lowest=300)[0] == [(300, 500, 0, 300)]


def test_equal_hashes_of_unequal_text_are_no_run():
    index = AnchorIndex(64)
    donor, prompt = make_text(200, seed=1), make_text(200, seed=2)
    hashes, positions = Fingerprinter(b"key", bytes(32)).anchors(prompt)
    index.insert(0, Anchors(hashes, positions))
    found, verifier = match([donor], prompt, index=index)
    assert found == []
    assert verifier.num_compared > 0


HOSTILE = {
    "one token, donors of one token": lambda: (
        [np.zeros(PROMPT_TOKENS, np.int32)] * 6,
        np.zeros(PROMPT_TOKENS, np.int32),
    ),
    "one token, donor shorter": lambda: ([np.zeros(300, np.int32)], np.zeros(PROMPT_TOKENS, np.int32)),
    "two tokens alternating": lambda: ([np.resize([1, 2], PROMPT_TOKENS)] * 6, np.resize([2, 1], PROMPT_TOKENS)),
    "one line repeated": lambda: (
        [np.resize(make_text(20), PROMPT_TOKENS)] * 6,
        np.resize(np.roll(make_text(20), 7), PROMPT_TOKENS),
    ),
    "long period": lambda: ([np.resize(make_text(700), PROMPT_TOKENS)] * 3, np.resize(make_text(700), PROMPT_TOKENS)),
    "many donors with one passage": lambda: (
        [join(make_text(20, seed=seed), make_text(500)) for seed in range(1, 1_001)],
        np.tile(make_text(500), 64),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_repetitive_text_is_covered_with_work_in_proportion_to_the_prompt(name):
    donors, prompt = HOSTILE[name]()
    found, verifier = match([donor.astype(np.int32) for donor in donors], prompt.astype(np.int32))
    assert coverage(found) == len(prompt)
    assert verifier.num_compared <= 40 * len(prompt)


def test_lines_in_random_order_are_covered_with_bounded_work():
    rng = np.random.default_rng(0)
    lines = make_text(40).reshape(2, 20)
    texts = [join(*(lines[i] for i in rng.integers(0, 2, 1_600))) for _ in range(7)]
    found, verifier = match(texts[:6], texts[6])
    assert coverage(found) == len(texts[6])
    assert verifier.num_compared <= 60 * len(texts[6])


def test_snippets_in_noise_cost_no_more_than_their_candidates():
    snippets = make_text(16_000).reshape(1_000, 16)
    donors = [
        join(*(part for i, s in enumerate(snippets) for part in (s, make_text(16, seed=1_000 * d + i))))
        for d in range(1, 8)
    ]
    prompt = join(*(part for i, s in enumerate(snippets) for part in (s, make_text(16, seed=90_000 + i))))
    _, verifier = match(donors, prompt)
    assert verifier.num_compared <= 10 * len(prompt)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("vocabulary", [2, 4, 1_000])
def test_every_run_of_32_is_found_in_random_and_periodic_text(seed, vocabulary):
    rng = np.random.default_rng(seed)
    pool = [make_text(int(rng.integers(1, 60)), seed=50 * seed + i, vocabulary=vocabulary) for i in range(4)]
    pool += [np.resize(part[: int(rng.integers(1, 20))], int(rng.integers(20, 60))) for part in pool]
    text = lambda: join(*(pool[i] for i in rng.integers(0, len(pool), 6)))  # noqa: E731
    donors, prompt = [text(), text()], text()
    grams = {donor[i : i + 32].tobytes() for donor in donors for i in range(len(donor) - 31)}
    expected = {i + j for i in range(len(prompt) - 31) if prompt[i : i + 32].tobytes() in grams for j in range(32)}
    index = AnchorIndex(4_096)
    found, _ = match(donors, prompt, index=index)
    covered = {position for start, end, *_ in found for position in range(start, end)}
    if not index.num_displaced:
        assert expected <= covered
