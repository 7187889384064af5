"""Decisions that the tensor-parallel ranks of one engine take together, so that none waits in a collective operation.

The rule: a vote comes directly before every collective operation, and around every piece of work that ranks do in step. A
rank that fails between two votes votes against; the others meet that vote at their next one, and all of them stop. (A rank
that dies within a collective operation of the model leaves the others to the timeout of vLLM's process group, as in vLLM.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

from kvgraft.errors import IntegrationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Result = TypeVar("Result")


class FailedTogetherError(IntegrationError):
    """A rank failed, and every rank knows it: there is no further vote about it."""


def all_ranks(agree: bool) -> bool:
    """Return whether all ranks agree; every rank must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return agree
    vote = torch.tensor([int(agree)])
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())


def together(work: Callable[[], Result]) -> Result:
    """Do work that every rank does in the same step, and fail on all of them if it fails on one.

    Raises:
        FailedTogetherError: Here or on another rank; the error here is its cause.
    """
    failure: Exception | None = None
    try:
        result = work()
    except FailedTogetherError:
        raise
    except Exception as error:  # noqa: BLE001 - the others wait for this rank's vote
        failure = error
    if all_ranks(failure is None):
        return result
    if failure is None:
        raise FailedTogetherError("another rank failed; its log says why")
    reason = f"{failure}" if isinstance(failure, IntegrationError) else f"{type(failure).__name__}: {failure}"
    raise FailedTogetherError(reason) from failure


def summed_over_ranks(values: Tensor) -> Tensor:
    """Sum a float32 tensor over the ranks, in host memory."""
    group = get_tp_group()
    values = values.cpu()
    if group.world_size > 1:
        together(lambda: None)
        torch.distributed.all_reduce(values, group=group.cpu_group)
    return values


def gathered(part: str) -> list[str]:
    """Return the parts of all ranks, in their order; every rank must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return [part]
    together(lambda: None)
    everything: list[str] = [""] * group.world_size
    torch.distributed.all_gather_object(everything, part, group=group.cpu_group)
    return everything


def lowest(values: Sequence[int]) -> list[int]:
    """Return the lowest of each value over all ranks; every rank must ask, with as many."""
    group = get_tp_group()
    if group.world_size == 1 or not values:
        return list(values)
    joint = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(joint, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    found: list[int] = joint.tolist()
    return found
