"""Random operations on a two-tier prefix cache with states beside its oracle; one seed, one sequence."""

from __future__ import annotations

from random import Random

from tests.support.ssm_walk import step
from tests.support.swa_walk import random_tokens
from tests.support.tiered_ssm_model import TieredStateModel


def random_tiered_walk(
    seed: int,
    num_operations: int,
    page_size: int,
    chunk_size: int,
    policy: str,
    *,
    write_policy: str = "write_back",
    host_pages: int = 4096,
    host_states: int = 4096,
    failure_rate: float = 0.0,
) -> TieredStateModel:
    """Run random operations, `check` after each; returns the model for its counts.

    Raises:
        AssertionError: Cache and oracle differ.
        CorruptCacheError: An invariant does not hold.
    """
    rng = Random(seed)
    model = TieredStateModel(
        page_size,
        chunk_size,
        policy,
        size=120 * page_size,
        host_pages=host_pages,
        host_states=host_states,
        write_policy=write_policy,
        fails=(lambda: rng.random() < failure_rate) if failure_rate else None,
    )
    for _ in range(num_operations):
        action = rng.random()
        tokens = random_tokens(rng, page_size, max(10, 3 * model.alignment // page_size))
        if action < 0.12:
            model.load_back(tokens)
        elif action < 0.2 and len(model.tickets) < 3:
            model.begin(tokens)
        elif action < 0.3 and model.tickets:
            model.end(commit=rng.random() < 0.7)
        elif action < 0.36:
            model.evict(rng.randrange(30 * page_size), rng.randrange(6))
        else:
            step(rng, model, page_size)
        model.check()
    return model
