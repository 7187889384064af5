"""What it costs a step that its text is copied to the host meanwhile, as the vLLM connector does with all text."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvgraft.bench.ttft import Draws
from kvgraft.errors import ConfigError
from kvgraft.graft.model import SequenceRows
from kvgraft.memory import SlotPool
from kvgraft.memory.packed import RowShape

from .card import gb_per_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch
    from numpy.typing import NDArray

    from kvgraft.bench.deadline import Deadline
    from kvgraft.engine import LLM
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.pool import KVPlace

    from .card import Card

_PIECE = 2048
"""Rows of a pass, as many as vLLM computes of a prompt in a step by default."""
_DECODED = 64
"""Tokens of an answer that are captured at a time."""


class Copied(Protocol):
    """K/V on their way."""

    @property
    def block(self) -> Future[KVBlock]:
        """They, once they are on the host."""


class Reader(Protocol):
    """Reads the K/V of positions out of homes; `integrations.vllm.worker.text_reader`."""

    def read(self, homes: Sequence[Any], positions: NDArray[np.int64]) -> Sequence[Copied]:
        """Begin to copy."""

    def close(self) -> None:
        """Finish what is on its way."""


@dataclass(frozen=True, slots=True, eq=False)
class _Home:
    """A sequence whose token at position p lies in slot p of the engine's pool, as readers see one."""

    pool: SlotPool

    @property
    def layers(self) -> range:
        """Numbers of the layers."""
        return range(len(self.pool.layers))

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """A tensor per layer; readers ask them for the device."""
        return tuple(self.pool.keys(layer) for layer in self.layers)

    @property
    def group(self) -> SimpleNamespace:
        """Shapes of the rows."""
        rows = [RowShape((shape.num_kv_heads, shape.head_dim), self.pool.dtype) for shape in self.pool.layers]
        return SimpleNamespace(layers=tuple(SimpleNamespace(rows=(row, row)) for row in rows))

    def place(self, positions: NDArray[np.int64]) -> KVPlace:
        """Return the place of positions."""
        return self.pool.place(positions)


def measure_capture(
    llm: LLM, card: Card, reader_of: Callable[[torch.device], Reader], *, rounds: int, seed: int, deadline: Deadline
) -> dict[str, Any]:
    """Time passes over a piece of a prompt, and decode steps, with a capture after each and without, in turns.

    Raises:
        ConfigError: The model has window slots of its own.
    """
    pool = llm.adapter.pool
    if not isinstance(pool, SlotPool):
        raise ConfigError("a model with window slots of its own is captured piece by piece; choose another")
    llm.reset()  # no slot is held, so that all may be written
    reader, home = reader_of(card.device), _Home(pool)
    piece = min(_PIECE, pool.num_slots // 2, llm.max_model_len // 2)
    prefill = SequenceRows(Draws(llm, (seed, 2)).tokens(piece), np.arange(piece), np.arange(piece))
    decode = SequenceRows(Draws(llm, (seed, 3)).tokens(1), np.array([piece]), np.arange(piece + 1))
    captured = {"prefill": (prefill, np.arange(piece)), "decode": (decode, np.arange(piece)[-_DECODED:])}
    try:
        reader.read([home], np.arange(piece))[0].block.result()  # the ring is made now
        found: dict[str, Any] = {}
        for name, (rows, positions) in captured.items():
            ends = time.perf_counter() + deadline.left_s / len(captured)
            times = _Times(llm, card, rows)
            while not times.landed or (len(times.landed) < rounds and time.perf_counter() < ends):
                times.take(partial(reader.read, [home], positions))
            found[name] = times.row(len(positions) * pool.bytes_per_token) | {"captured_tokens": len(positions)}
        return {**found, "num_waits": getattr(reader, "num_waits", 0)}
    finally:
        reader.close()


class _Times:
    """Seconds of a pass without a capture after it, with one, and until its text is on the host; a pass of each in turns."""

    def __init__(self, llm: LLM, card: Card, rows: SequenceRows) -> None:
        self._forward = lambda: llm.adapter.forward([rows])
        self._finish = card.finish
        self.num_rows = len(rows.positions)
        self.plain: list[float] = []
        self.capturing: list[float] = []
        self.landed: list[float] = []
        self._seconds(self._forward)

    def take(self, capture: Callable[[], Sequence[Copied]]) -> None:
        """Measure one round."""
        self.plain.append(self._seconds(self._forward))
        parts: list[Copied] = []
        started = time.perf_counter()
        self.capturing.append(self._seconds(self._forward, lambda: parts.extend(capture())))
        for part in parts:
            part.block.result()
        self.landed.append(time.perf_counter() - started)

    def row(self, num_bytes: int) -> dict[str, Any]:
        """Return medians, for captures of so many bytes."""
        step_s, captured_s, landed_s = map(statistics.median, (self.plain, self.capturing, self.landed))
        return {
            "rows": self.num_rows,
            "step_ms": 1e3 * step_s,
            "step_with_capture_ms": 1e3 * captured_s,
            "overhead": captured_s / step_s - 1,
            "landed_ms": 1e3 * landed_s,
            "captured_gb_s": gb_per_s(num_bytes, landed_s - step_s),
            "rounds": len(self.landed),
        }

    def _seconds(self, *works: Callable[[], object]) -> float:
        started = time.perf_counter()
        for work in works:
            work()
        self._finish()
        return time.perf_counter() - started
