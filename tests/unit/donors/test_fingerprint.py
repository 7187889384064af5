"""Fingerprinter: equal text has equal anchors anywhere, under one key only, often enough and not too often."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors import fingerprint
from kvgraft.donors.fingerprint import GRAM_TOKENS, GUARANTEED_RUN, WINDOW_GRAMS, Fingerprinter

KEY = b"0123456789abcdef"
SECRET = bytes(range(32))


def make_text(length, *, seed=0, vocabulary=30_000):
    return np.random.default_rng(seed).integers(0, vocabulary, length, dtype=np.int32)


def anchors_of(text, key=KEY, secret=SECRET):
    found = Fingerprinter(key, secret).anchors(np.asarray(text, np.int32))
    return list(zip(found.hashes.tolist(), found.positions.tolist(), strict=True))


def test_text_below_a_gram_has_no_anchor():
    assert anchors_of(make_text(GRAM_TOKENS - 1)) == []


@pytest.mark.parametrize("length", [GRAM_TOKENS, GRAM_TOKENS + 1, GUARANTEED_RUN - 1, GUARANTEED_RUN])
def test_text_of_a_gram_or_more_has_an_anchor(length):
    found = anchors_of(make_text(length))
    assert found
    assert all(0 <= position <= length - GRAM_TOKENS for _, position in found)


def test_gram_hash_depends_on_its_tokens_alone():
    text = make_text(200)
    hashes = Fingerprinter(KEY, SECRET).gram_hashes(text).copy()
    assert len(hashes) == 200 - GRAM_TOKENS + 1
    for start in (0, 1, 77, 184):
        assert Fingerprinter(KEY, SECRET).gram_hashes(text[start : start + GRAM_TOKENS]).tolist() == [hashes[start]]


def test_gram_hash_changes_with_each_token_and_with_their_order():
    text = make_text(GRAM_TOKENS)
    variants = [text] + [np.where(np.arange(GRAM_TOKENS) == i, text + 1, text) for i in range(GRAM_TOKENS)]
    variants += [text[::-1].copy(), np.roll(text, 1)]
    hashes = {int(Fingerprinter(KEY, SECRET).gram_hashes(variant.astype(np.int32))[0]) for variant in variants}
    assert len(hashes) == len(variants)


def test_anchors_do_not_depend_on_position():
    passage = make_text(500)
    inside = {(h, p) for h, p in anchors_of(passage) if WINDOW_GRAMS <= p <= 500 - GRAM_TOKENS - WINDOW_GRAMS}
    for shift in (1, 16, 333):
        moved = anchors_of(np.concatenate([make_text(shift, seed=1), passage, make_text(50, seed=2)]))
        assert {(h, p + shift) for h, p in inside} <= set(moved)


def test_every_guaranteed_run_shares_an_anchor():
    shared = make_text(GUARANTEED_RUN)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        left, right = (
            np.concatenate([make_text(rng.integers(0, 60), seed=s), shared, make_text(rng.integers(0, 60), seed=s + 1)])
            for s in (2 * seed + 7, 2 * seed + 1_007)
        )
        assert {h for h, _ in anchors_of(left)} & {h for h, _ in anchors_of(right)}


def test_every_window_of_grams_has_an_anchor():
    positions = np.array([position for _, position in anchors_of(make_text(20_000))])
    assert positions[0] < WINDOW_GRAMS
    assert np.diff(positions).max() <= WINDOW_GRAMS


def test_random_text_has_two_anchors_in_a_window_and_one():
    density = len(anchors_of(make_text(100_000))) / 100_000
    assert density == pytest.approx(2 / (WINDOW_GRAMS + 1), rel=0.03)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 8, 16])
def test_periodic_text_has_no_more_anchors_than_windows(period):
    text = np.resize(make_text(period), 10_000)
    assert len(anchors_of(text)) <= 10_000 / WINDOW_GRAMS + 3


def test_chain_of_one_repeated_gram_keeps_its_ends():
    text = np.concatenate([make_text(100, seed=1), np.full(200, 5, np.int32), make_text(100, seed=2)])
    full = int(Fingerprinter(KEY, SECRET).anchors(np.full(GRAM_TOKENS, 5, np.int32)).hashes[0])
    positions = [position for h, position in anchors_of(text) if h == full]
    assert positions[0] == 100
    assert positions[-1] == 300 - GRAM_TOKENS


def test_keys_separate():
    text = make_text(5_000)
    ours, theirs = anchors_of(text), anchors_of(text, b"fedcba9876543210")
    assert not {h for h, _ in ours} & {h for h, _ in theirs}
    assert {p for _, p in ours} != {p for _, p in theirs}


def test_secrets_separate():
    text = make_text(5_000)
    assert not {h for h, _ in anchors_of(text)} & {h for h, _ in anchors_of(text, secret=bytes(32))}


@pytest.mark.parametrize("length", [16, 32, 33, 50, 64, 100])
def test_passage_hash_depends_on_all_its_tokens_their_order_and_nothing_else(length):
    text, fingerprinter = make_text(300), Fingerprinter(KEY, SECRET)
    hashes = fingerprinter.passages(text, length).copy()
    assert len(set(hashes.tolist())) == len(hashes) == 300 - length + 1
    passage = text[100 : 100 + length]
    assert fingerprinter.passages(passage, length).tolist() == [hashes[100]]
    variants = [np.where(np.arange(length) == i, passage + 1, passage).astype(np.int32) for i in range(length)]
    variants += [np.roll(passage, shift) for shift in (1, 16, 32) if shift % length]
    variants += [passage[np.r_[:16, 32:48, 16:32, 48:length]]] if length >= 48 else []
    assert hashes[100] not in {int(fingerprinter.passages(variant, length)[0]) for variant in variants}


def test_hash_is_never_zero_and_does_not_depend_on_the_process():
    found = anchors_of(np.arange(40))
    assert all(h > 0 for h, _ in found)
    assert found == anchors_of(np.arange(40))


def test_lower_bits_are_spread_evenly():
    hashes = Fingerprinter(KEY, SECRET).anchors(make_text(200_000)).hashes
    counts = np.bincount((hashes & np.uint64(255)).astype(np.int64), minlength=256)
    mean = len(hashes) / 256
    assert abs(counts - mean).max() < 6 * mean**0.5


def test_memory_that_is_missing_once_is_no_matter_later(monkeypatch):
    """Of the two arrays of a thread one is had and the other is not."""
    made, fingerprinter = np.empty, Fingerprinter(KEY, SECRET)
    text = make_text(1000 + fingerprint._BUFFERS.words.shape[1])

    def missing(shape, dtype=float):
        if dtype is np.uint32:
            raise MemoryError
        return made(shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", missing)
        with pytest.raises(MemoryError):
            fingerprinter.anchors(text)
    assert len(fingerprinter.anchors(text).hashes)
