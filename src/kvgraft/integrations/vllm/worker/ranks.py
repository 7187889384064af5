"""Collective operations of the tensor-parallel ranks of one engine, which do their work `together`.

Work that fails on one rank fails on all; every rank must call it. A rank that dies within a collective operation of
the model leaves the others to the timeout of vLLM's process group, as in vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tp_group

from kvgraft.reuse.together import Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _reduced(values: Sequence[int]) -> list[int]:
    group = get_tp_group()
    if group.world_size == 1:
        return list(values)
    joint = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(joint, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    found: list[int] = joint.tolist()
    return found


together = Together(_reduced)


def all_ranks(agree: bool) -> bool:
    """Return whether all ranks agree; every rank must ask."""
    return bool(together.meet("vote", int(agree))[0])


def summed_over_ranks(values: Tensor) -> Tensor:
    """Sum a float32 tensor over the ranks, in host memory."""
    group = get_tp_group()
    values = values.cpu()
    if group.world_size > 1:
        together.meet(f"sum of {values.numel()}")
        torch.distributed.all_reduce(values, group=group.cpu_group)
    return values


def gathered(part: str) -> list[str]:
    """Return the parts of all ranks, in their order; every rank must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return [part]
    together.meet("gather")
    everything: list[str] = [""] * group.world_size
    torch.distributed.all_gather_object(everything, part, group=group.cpu_group)
    return everything


def lowest(values: Sequence[int]) -> list[int]:
    """Return the lowest of each value over all ranks; every rank must ask, with as many."""
    together.meet(f"lowest of {len(values)}")
    return _reduced(values) if values else []
