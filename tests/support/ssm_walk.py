"""Random operations on a prefix cache with states beside its oracle; one seed, one sequence."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.support.ssm_model import StateModel
from tests.support.swa_walk import random_tokens

if TYPE_CHECKING:
    from tests.support.ssm_model import HeldLock


def random_walk(seed: int, num_operations: int, page_size: int, chunk_size: int, policy: str) -> StateModel:
    """Run random operations, `check` after each; returns the model for its counts.

    Raises:
        AssertionError: Cache and oracle differ.
        CorruptCacheError: An invariant does not hold.
    """
    rng = Random(seed)
    model = StateModel(page_size, chunk_size, policy, size=200 * page_size)
    for _ in range(num_operations):
        step(rng, model, page_size)
        model.check()
    return model


def step(rng: Random, model: StateModel, page_size: int) -> None:
    """Do one random operation on both."""
    tokens = random_tokens(rng, page_size, max(10, 3 * model.alignment // page_size))
    held: HeldLock | None = rng.choice(model.locks) if model.locks else None
    lock = len(model.locks) < 4 and rng.random() < 0.3
    action = rng.random()
    if action < 0.33:
        model.match(tokens, lock=lock)
    elif action < 0.57:
        model.insert(tokens, _positions(rng, model, len(tokens)), priority=rng.randrange(3), lock=lock)
    elif action < 0.66 and held is not None and len(held.tokens) < 20 * page_size:
        length = len(held.tokens) + len(tokens)
        model.insert(tokens, _positions(rng, model, length, len(held.tokens)), held, lock=lock)
    elif action < 0.74:
        model.evict(rng.choice((0, rng.randrange(3 * page_size))), rng.choice((0, rng.randrange(3))))
    elif action < 0.82:
        model.evict_at_once(rng.choice((0, rng.randrange(3 * page_size))), rng.choice((0, rng.randrange(4))))
    elif action < 0.88 and held is not None and held.holds_state:
        model.release_state(held)
    elif action < 0.998 and held is not None:
        model.unlock(held)
    elif action >= 0.998:
        model.reset()


def _positions(rng: Random, model: StateModel, length: int, start: int = 0) -> list[int]:
    """None, the end, or a few, most of them where a state can be."""
    fitting = range(model.alignment, length + 1, model.alignment)
    kinds = rng.random()
    if kinds < 0.1:
        return []
    if kinds < 0.2:
        return [rng.randrange(length + 1)]
    if kinds < 0.3 and start:
        return [start]
    return rng.sample(fitting, min(len(fitting), rng.randrange(1, 4)))
