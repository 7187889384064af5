"""Choose the attention backend of an engine: the fastest that is there and gives the right answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.engine.attention.base import AttentionBackend, LayerQuery
from kvgraft.engine.attention.sdpa import SdpaBackend
from kvgraft.errors import ConfigError
from kvgraft.graft.model import SequenceRows
from kvgraft.memory.pool import LayerShape, SlotPool
from kvgraft.windows import ChunkedWindow, SlidingWindow

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_CHECK_SLOTS = 400
_CHECK_WINDOWS = (SlidingWindow(37), ChunkedWindow(37))
_CHECK_SOFTCAP = 3.0


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend and why it was chosen.

    Attributes:
        backend: The backend.
        reason: One line for `kvgraft doctor` and the log.
    """

    backend: AttentionBackend
    reason: str


def _flex(device: torch.device) -> AttentionBackend:
    from kvgraft.engine.attention.flex import FlexBackend

    return FlexBackend(compiled=device.type == "cuda")


ATTENTION_BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "flex": _flex,
    "sdpa": lambda _device: SdpaBackend(),
}
"""Names of the setting `attention`, besides `auto`."""


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Needs of a model that a backend must meet.

    Attributes:
        shape: K/V heads and head size.
        num_heads: Query heads.
        has_sinks: Whether heads have attention sinks.
    """

    shape: LayerShape
    num_heads: int
    has_sinks: bool = False


def choose_attention(name: str, heads: AttentionHeads, dtype: torch.dtype, device: torch.device) -> AttentionChoice:
    """Return the backend `name`; `auto` takes `flex` on CUDA and `sdpa` elsewhere.

    Another backend than `sdpa` must reproduce `sdpa` on random K/V first; one that is missing, fails or differs is
    replaced by `sdpa` with a warning, never an error.

    Raises:
        ConfigError: There is no backend of that name.
    """
    if name != "auto" and name not in ATTENTION_BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; choose auto, {', '.join(ATTENTION_BACKENDS)}")
    wanted = name if name != "auto" else ("flex" if device.type == "cuda" else "sdpa")
    if wanted == "sdpa":
        return AttentionChoice(SdpaBackend(), f"sdpa on {device.type}")
    try:
        backend = ATTENTION_BACKENDS[wanted](device)
        error = difference_to_sdpa(backend, heads, dtype, device)
    except Exception as failure:  # noqa: BLE001 - a compiler throws anything, and another backend is there
        reason = f"sdpa, because {wanted} does not run here: {type(failure).__name__}: {str(failure).splitlines()[0]}"
    else:
        if error <= _TOLERANCE.get(dtype, 0.0):
            return AttentionChoice(backend, f"{wanted} on {device.type}, self-check within {error:.1e} of sdpa")
        reason = f"sdpa, because {wanted} differs from it by {error:.1e}"
    logger.warning("attention backend: %s", reason)
    return AttentionChoice(SdpaBackend(), reason)


@torch.inference_mode()
def difference_to_sdpa(
    backend: AttentionBackend, heads: AttentionHeads, dtype: torch.dtype, device: torch.device
) -> float:
    """Largest difference of `backend` to `sdpa` on a chunk, scattered rows and decode rows, in all forms asked for."""
    shape = heads.shape
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    pool = SlotPool([shape], _CHECK_SLOTS, dtype, device)
    slots = rng.permutation(_CHECK_SLOTS)
    everything = pool.index(np.arange(_CHECK_SLOTS))
    pool.write(0, everything, random(*_size(shape)), random(*_size(shape)))
    batch = []
    for first, length, positions in (
        (0, 150, np.arange(150)),
        (150, 150, np.sort(rng.permutation(150)[:40])),
        (300, 60, np.array([59])),
        (360, 1, np.array([0])),
    ):
        batch.append(SequenceRows(np.zeros(len(positions), np.int64), positions, slots[first : first + length]))
    query = random(heads.num_heads, sum(len(rows.positions) for rows in batch), shape.head_dim)
    worst = 0.0
    plain = LayerQuery(query, shape.head_dim**-0.5)
    forms = [plain, replace(plain, softcap=_CHECK_SOFTCAP), *(replace(plain, window=kind) for kind in _CHECK_WINDOWS)]
    if heads.has_sinks:
        sinks = random(heads.num_heads)
        forms += [replace(plain, sinks=sinks), replace(plain, sinks=sinks, window=_CHECK_WINDOWS[0])]
    for asked in forms:
        actual = backend.plan(batch, pool).attend(0, asked)
        expected = SdpaBackend().plan(batch, pool).attend(0, asked)
        worst = max(worst, float((actual.float() - expected.float()).abs().max()))
    return worst


def _size(shape: LayerShape) -> tuple[int, int, int]:
    return _CHECK_SLOTS, shape.num_kv_heads, shape.head_dim
