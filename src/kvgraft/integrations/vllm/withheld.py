"""Engine steps as stores beside us see them: without requests that hold approximate K/V."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


def shown_to_stores(output: SchedulerOutput, withheld: AbstractSet[str], known: AbstractSet[str]) -> SchedulerOutput:
    """Return the step as if the withheld requests waited.

    Args:
        output: What vLLM schedules; it is not changed.
        withheld: Requests of which nothing more may be saved.
        known: Requests of which stores know the blocks. They hear of the preemption of these even if they are withheld:
            saves may be under way.

    Returns:
        `output` itself if no request is withheld in it.

    Complexity: O(scheduled requests).
    """
    scheduled = output.num_scheduled_tokens
    preempted = output.preempted_req_ids
    if withheld.isdisjoint(scheduled) and (not preempted or withheld.isdisjoint(preempted)):
        return output
    kept = {req_id: count for req_id, count in scheduled.items() if req_id not in withheld}
    changed: dict[str, Any] = {
        "scheduled_new_reqs": [new for new in output.scheduled_new_reqs if new.req_id not in withheld],
        "scheduled_cached_reqs": _cached(output.scheduled_cached_reqs, withheld),
        "num_scheduled_tokens": kept,
        "total_num_scheduled_tokens": sum(kept.values()),
        "preempted_req_ids": preempted
        and {req_id for req_id in preempted if req_id not in withheld or req_id in known},
    }
    for name in ("scheduled_spec_decode_tokens", "scheduled_encoder_inputs"):
        changed[name] = _without(getattr(output, name), withheld)
    blocks = getattr(output, "kv_connector_block_state", None)
    if blocks is not None:
        changed["kv_connector_block_state"] = replace(
            blocks,
            req_ids=set(blocks.req_ids) - withheld,
            boundary_state_offloads=_without(blocks.boundary_state_offloads, withheld),
        )
    return replace(output, **changed)


def _cached(data: CachedRequestData, withheld: AbstractSet[str]) -> CachedRequestData:
    """The running requests that are not withheld: lists run beside `req_ids`, the rest goes by name."""
    kept = [index for index, req_id in enumerate(data.req_ids) if req_id not in withheld]
    changed: dict[str, Any] = {}
    for field in fields(data):
        value = getattr(data, field.name)
        if isinstance(value, list):
            # `new_token_ids` is filled with pipeline parallelism only.
            changed[field.name] = [value[index] for index in kept] if len(value) == len(data.req_ids) else value
        elif isinstance(value, dict):
            changed[field.name] = _without(value, withheld)
        elif isinstance(value, set):
            changed[field.name] = value - withheld
    return replace(data, **changed)


def _without(by_request: dict[str, Any], withheld: AbstractSet[str]) -> dict[str, Any]:
    return {req_id: value for req_id, value in by_request.items() if req_id not in withheld}
