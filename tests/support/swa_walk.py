"""Random operations on a hybrid prefix cache beside its oracle; one seed, one sequence."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.support.swa_model import SWAModel

if TYPE_CHECKING:
    from tests.support.swa_model import HeldLock, Tokens

    from kvgraft.windows import WindowKind


def random_walk(seed: int, num_operations: int, page_size: int, window: WindowKind, *, leaf_cap: bool) -> SWAModel:
    """Run random operations, `check` after each; returns the model for its counts.

    Raises:
        AssertionError: Cache and oracle differ.
        CorruptCacheError: An invariant does not hold.
    """
    rng = Random(seed)
    model = SWAModel(page_size, window, leaf_cap=leaf_cap)
    for _ in range(num_operations):
        _step(rng, model, page_size, window.size)
        model.check()
    return model


def random_tokens(rng: Random, page_size: int, max_pages: int) -> Tokens:
    """Pages that differ early, late or not at all, and a tail shorter than a page."""
    kinds = ((1,) * page_size, (2,) * page_size, (1,) * (page_size - 1) + (3,))
    num_pages, tail = rng.randrange(max_pages + 1), rng.randrange(page_size)
    return tuple(token for _ in range(num_pages) for token in rng.choice(kinds)) + (1,) * tail


def _step(rng: Random, model: SWAModel, page_size: int, window: int) -> None:
    max_pages = min(12, 4 + 2 * -(-window // page_size))
    tokens = random_tokens(rng, page_size, max_pages)
    held: HeldLock | None = rng.choice(model.locks) if model.locks else None
    lock = len(model.locks) < 4 and rng.random() < 0.3
    action = rng.random()
    if action < 0.35:
        model.match(tokens, lock=lock)
    elif action < 0.6:
        evicted = rng.choice((0, rng.randrange(len(tokens) + 1)))
        model.insert(tokens, evicted, lock=lock)
    elif action < 0.68 and held is not None:
        model.insert(tokens, len(held.tokens) + rng.randrange(len(tokens) + 1) * rng.randrange(2), held, lock=lock)
    elif action < 0.82:
        model.evict(rng.choice((0, rng.randrange(3 * page_size))), rng.choice((0, rng.randrange(5 * page_size))))
    elif action < 0.87 and held is not None and not held.swa_released:
        model.release_window(held)
    elif action < 0.998 and held is not None:
        model.unlock(held)
    elif action >= 0.998:
        model.reset()
