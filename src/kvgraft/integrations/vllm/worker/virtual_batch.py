"""Compute chosen positions of a request in one extra forward pass.

Every run of consecutive positions becomes a *virtual request* on the request's own block table: its queries are the run, its
sequence ends with the run. A layer stores all new K/V before it attends, so that a later run sees what an earlier one has
computed: causality is exact, with the backend's own kernel and metadata builder.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from vllm.config import VllmConfig

    from kvgraft.integrations.vllm.worker.layers import LayerGroup


@dataclass(frozen=True, slots=True, eq=False)
class RowRuns:
    """Consecutive positions, run by run.

    Attributes:
        positions: int64, ascending.
        starts: int32 `(num_runs + 1,)`, where each run begins in `positions`.
        ends: int32 `(num_runs,)`, first position after each run.
    """

    positions: NDArray[np.int64]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    @classmethod
    def of(cls, positions: NDArray[np.int64]) -> RowRuns:
        """Split ascending positions into runs; there must be one at least."""
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        starts = np.concatenate([[0], breaks, [len(positions)]]).astype(np.int32)
        return cls(positions, starts, (positions[starts[1:] - 1] + 1).astype(np.int32))

    @staticmethod
    def within(positions: NDArray[np.int64], most_runs: int | None) -> int:
        """Return how many of ascending positions, from the first on, lie in at most so many runs; None for any number."""
        if most_runs is None:
            return len(positions)
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        return len(positions) if len(breaks) < most_runs else int(breaks[most_runs - 1])

    @classmethod
    def lone(cls, position: int) -> RowRuns:
        """Return one token that attends to itself alone, encoded at `position`."""
        return cls(np.array([position]), np.array([0, 1], np.int32), np.array([1], np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Slots of a request in one group: `blocks`, int32, has the block of each `block_size` positions."""

    blocks: NDArray[np.int32]
    block_size: int

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of `positions`."""
        return (
            self.blocks[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        )


@contextmanager
def virtual_batch(
    vllm_config: VllmConfig,
    groups: Sequence[LayerGroup],
    tables: Sequence[BlockTable],
    runs: RowRuns,
    device: torch.device,
) -> Iterator[Tensor]:
    """Set vLLM's forward context for `runs` and yield their positions on the device.

    Args:
        vllm_config: Of the engine.
        groups: All groups of the model.
        tables: One per group, with blocks for every position that the runs compute or attend to.
        runs: Positions to compute.
        device: Device of the caches.
    """
    positions = torch.from_numpy(runs.positions).to(device)
    metadata, slot_mapping = {}, {}
    for group, table in zip(groups, tables, strict=True):
        slots = torch.from_numpy(table.slots(runs.positions)).to(device)
        common = _common_metadata(table, runs, positions, slots)
        for builder, names in group.builders:
            built = builder.build(common_prefix_len=0, common_attn_metadata=common)
            metadata.update(dict.fromkeys(names, built))
        slot_mapping.update({layer.name: slots for layer in group.layers})
    with set_forward_context(
        metadata, vllm_config, num_tokens=len(runs.positions), skip_compiled=True, slot_mapping=slot_mapping
    ):
        yield positions


def _common_metadata(table: BlockTable, runs: RowRuns, positions: Tensor, slots: Tensor) -> CommonAttentionMetadata:
    starts_cpu = torch.from_numpy(runs.starts)
    num_blocks = -(-int(runs.ends[-1]) // table.block_size)
    blocks = torch.from_numpy(table.blocks[:num_blocks]).to(slots.device)
    return CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(slots.device),
        query_start_loc_cpu=starts_cpu,
        seq_lens=torch.from_numpy(runs.ends).to(slots.device),
        num_reqs=len(runs.ends),
        num_actual_tokens=len(runs.positions),
        max_query_len=int(np.diff(runs.starts).max()),
        max_seq_len=int(runs.ends[-1]),
        block_table_tensor=blocks.expand(len(runs.ends), -1).contiguous(),
        slot_mapping=slots,
        causal=True,
        positions=positions,
    )
