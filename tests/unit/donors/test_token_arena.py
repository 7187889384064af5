"""TokenArena: texts keep their tokens while they move, and no store ever runs out of room or moves much."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors.arena import BLOCK_TOKENS, TokenArena, token_blocks
from kvgraft.errors import CorruptCacheError


def make_text(length, seed):
    return np.random.default_rng(seed).integers(0, 1_000, length, dtype=np.int32)


def test_blocks_are_the_tokens_from_each_index_on():
    text = np.arange(40, dtype=np.int32)
    blocks = token_blocks(text)
    assert blocks.shape == (40 - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    assert blocks[8].tolist() == list(range(8, 40))


def test_stored_text_is_returned_by_row():
    arena = TokenArena(100, 4)
    arena.store(2, make_text(30, 1))
    arena.store(0, make_text(70, 2))
    assert arena.get(2).tolist() == make_text(30, 1).tolist()
    assert arena.get(0).tolist() == make_text(70, 2).tolist()
    assert arena.lengths.tolist() == [70, 0, 30, 0]
    assert arena.blocks[arena.starts[0]].tolist() == make_text(70, 2)[:BLOCK_TOKENS].tolist()
    arena.check()


@pytest.mark.parametrize("lengths", [(1, 40), (16, 17), (1, 2), (300, 500)])
@pytest.mark.parametrize("seed", range(4))
def test_full_arena_keeps_every_text_through_any_history(lengths, seed):
    rng = np.random.default_rng(seed)
    budget, stored = 1_000, {}
    arena = TokenArena(budget, 1_001)
    for step in range(1_500):
        text = make_text(int(rng.integers(lengths[0], lengths[1] + 1)), step)
        while sum(map(len, stored.values())) + len(text) > budget:
            arena.remove(gone := list(stored)[int(rng.integers(len(stored)))])
            del stored[gone]
        row = next(row for row in range(1_001) if row not in stored)
        arena.store(row, text)
        stored[row] = text
        if step % 50 == 0:
            arena.check()
    for row, text in stored.items():
        assert arena.get(row).tolist() == text.tolist()


def test_store_moves_text_in_proportion_to_its_own_length(monkeypatch):
    moved = []
    pack = TokenArena._pack
    monkeypatch.setattr(TokenArena, "_pack", lambda arena, row: moved.append(size := pack(arena, row)) or size)
    arena = TokenArena(64_000, 1_000)
    worst = 0
    for step in range(6_000):
        row = step % 1_000
        arena.remove(row)
        moved.clear()
        arena.store(row, make_text(64, 0))
        worst = max(worst, sum(moved))
    assert worst <= 5 * 64 + 64


def test_clear_gives_all_room_back():
    arena = TokenArena(100, 4)
    arena.store(0, make_text(100, 0))
    arena.clear()
    arena.store(1, make_text(100, 1))
    assert arena.get(1).tolist() == make_text(100, 1).tolist()
    arena.check()


@pytest.mark.parametrize(
    ("row", "start", "message"), [(1, 5, "overlap"), (1, 500, "overlap or pass the head"), (0, 3, "lost|order|overlap")]
)
def test_check_finds_damage(row, start, message):
    arena = TokenArena(100, 4)
    arena.store(0, make_text(10, 0))
    arena.store(1, make_text(10, 1))
    arena.starts[row] = start
    with pytest.raises(CorruptCacheError, match=message):
        arena.check()
