"""A decode step that computes rows of a prompt once more: is there room for them beside the weights that it reads?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.ttft import Draws
from kvgraft.graft.model import SequenceRows

from .card import gb_per_s
from .subject import weight_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.bench.deadline import Deadline
    from kvgraft.engine import LLM

    from .card import Card

REPAIR_ROWS = (0, 16, 64, 256)
_FREE = 1.05
"""A step that takes so many times longer counts as one that takes as long."""
_NEAR = 2.0
"""A step is bound by memory if it takes less than so many times what reading weights and K/V takes."""
_QUEUED = 0.9
"""A step is bound by the processor if queueing it takes this share of it."""


def measure_decode_step(
    llm: LLM, card: Card, lengths: Sequence[int], *, device_gb_s: float, rounds: int, seed: int, deadline: Deadline
) -> dict[str, Any]:
    """Time steps of one sequence with each of `REPAIR_ROWS` in one run, as `repair_rows` has them, from the prompt's half on.

    `repair_rows` is the most rows that cost nothing at any length, None where nothing was measured.
    """
    rows: list[dict[str, Any]] = []
    skipped: dict[int, str] = {}
    llm.reset()  # no slot is held, so that all may be written
    for length in sorted(lengths):
        room = min(llm.space.pool.num_slots, llm.max_model_len)
        reason = f"{room} tokens have room" if length > room else deadline.reason_to_skip(0.0)
        if reason or length // 2 <= max(REPAIR_ROWS):
            skipped[length] = reason or f"it is shorter than {2 * max(REPAIR_ROWS)} tokens"
            continue
        plain_s = 0.0
        num_bytes = weight_bytes(llm.loaded.model) + length * llm.adapter.pool.bytes_per_token
        for count in REPAIR_ROWS:
            batch = [_rows(llm, length, count, seed)]
            share_s = deadline.left_s / (len(REPAIR_ROWS) * len(lengths))
            timing = card.timed(partial(llm.adapter.forward, batch), rounds=rounds, budget_s=share_s)
            plain_s = plain_s or timing.seconds
            rows.append(
                {
                    "length": length,
                    "repair_rows": count,
                    "step_ms": 1e3 * timing.seconds,
                    "queued_ms": 1e3 * timing.queued_s,
                    "rounds": timing.rounds,
                    "times_plain": timing.seconds / plain_s,
                    "read_gb_s": gb_per_s(num_bytes, timing.seconds),
                    "bound_by": _bound(timing.seconds, timing.queued_s, num_bytes / 1e9 / device_gb_s, card),
                }
            )
    return {"rows": rows, "skipped": skipped, "repair_rows": _free_rows(rows)}


def _rows(llm: LLM, length: int, count: int, seed: int) -> SequenceRows:
    positions = np.append(np.arange(length // 2, length // 2 + count), length - 1)
    token_ids = Draws(llm, (seed, length, count)).tokens(len(positions))
    return SequenceRows(token_ids, positions, np.arange(length))


def _bound(seconds: float, queued_s: float, read_s: float, card: Card) -> str:
    if not card.is_cuda:
        return "processor"
    if seconds < _NEAR * read_s:
        return "memory"
    return "launches" if queued_s > _QUEUED * seconds else "arithmetic"


def _free_rows(rows: Sequence[dict[str, Any]]) -> int | None:
    dear = {row["repair_rows"] for row in rows if row["times_plain"] > _FREE}
    free = [count for count in REPAIR_ROWS if not any(limit <= count for limit in dear)]
    return max(free, default=0) if rows else None
