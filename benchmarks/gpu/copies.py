"""Copying K/V of a donor with its keys rotated, against the bandwidth that a plain copy reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.executor import BlockSource, RotatedSpans, SpanCopy, copy_spans
from kvgraft.memory.block import KVBlock
from kvgraft.memory.host_memory import HOST_MEMORY, page_locked_memory
from kvgraft.memory.packed import packed
from kvgraft.memory.page_lock import CudaPages

from .card import gb_per_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.bench.deadline import Deadline
    from kvgraft.engine import LLM
    from kvgraft.graft.executor import KVSource

    from .card import Card

_MOST_TOKENS = 8192
_SHIFT = 200


def measure_copies(
    llm: LLM, card: Card, bandwidth: Mapping[str, float], *, rounds: int, deadline: Deadline
) -> dict[str, Any]:
    """Copy a donor from the pool, in one run of slots and in scattered ones, and from page-locked memory.

    Raises:
        ConfigError: K/V of this model are not moved, or lie in two spaces.
    """
    pool, rope = llm.adapter.pool, llm.adapter.rope
    if rope is None or not hasattr(pool, "place"):
        raise ConfigError(f"K/V of this model are not moved: {llm.graft_refusal}")
    llm.reset()  # no slot is held, so that all may be written
    count = min(_MOST_TOKENS, (pool.num_slots - _SHIFT) // 2, llm.max_model_len - _SHIFT)
    num_bytes = count * pool.bytes_per_token
    ours, theirs = np.arange(count), np.arange(count, 2 * count)
    scattered = np.random.default_rng(0).permutation(theirs)
    target = pool.place(ours)
    read = [pool.place(theirs).read(layer) for layer in range(llm.adapter.num_layers)]
    memory = page_locked_memory(num_bytes, CudaPages()) if card.is_cuda else HOST_MEMORY
    block = KVBlock(tuple(keys.cpu() for keys, _ in read), tuple(values.cpu() for _, values in read))
    sources: dict[str, tuple[KVSource, str, int]] = {
        "run_of_slots": (pool.place(theirs), "device_gb_s", 2),
        "scattered_slots": (pool.place(scattered), "device_gb_s", 2),
        "from_host": (BlockSource(packed([block], memory), card.device), "from_host_gb_s", 1),
    }
    found: dict[str, Any] = {"tokens": count, "bytes": num_bytes}
    for name, (source, limit, passes) in sources.items():

        def copy(source: KVSource = source) -> None:
            spans = RotatedSpans([SpanCopy(source, 0, _SHIFT, count)], rope, card.device)
            copy_spans(spans, target, range(llm.adapter.num_layers))

        timing = card.timed(copy, rounds=rounds, budget_s=deadline.left_s / len(sources))
        rate = gb_per_s(passes * num_bytes, timing.seconds)
        found[name] = {
            "ms": 1e3 * timing.seconds,
            "queued_ms": 1e3 * timing.queued_s,
            "gb_s": rate,
            "of_bandwidth": rate / bandwidth[limit],
            "rounds": timing.rounds,
        }
    return found
