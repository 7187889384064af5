"""Interfaces of the installed vLLM that the connector relies on, tried out at start: a difference refuses reuse by name.

The contract tests look closer; this check lets in versions that were not tested.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from kvgraft.integrations.vllm.scheduler.private_hashes import make_private

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS: dict[type, frozenset[str]] = {
    NewRequestData: frozenset({"req_id", "block_ids", "num_computed_tokens"}),
    CachedRequestData: frozenset({"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"}),
    SchedulerOutput: frozenset(
        {
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "preempted_req_ids",
            "has_sync_kv_loads",
        }
    ),
}
"""Fields of the scheduler's output that are read."""

_BLOCK = 4


def drift() -> str:
    """Return the first difference from the interfaces the connector was written for, or an empty text."""
    if not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
        return (
            "this vLLM does not show connectors its KV cache manager, which knows blocks without K/V; use 0.32 or later"
        )
    for kind, needed in FIELDS.items():
        missing = needed - {field.name for field in dataclasses.fields(kind)}
        if missing:
            return f"vLLM's {kind.__name__} lacks {', '.join(sorted(missing))}; reuse needs it"
    return (
        "" if _keeps_blocks_private() else "blocks of a request cannot be kept private in this vLLM; reuse needs that"
    )


def _keeps_blocks_private() -> bool:
    """Whether blocks that fill up after a graft get private hashes, on vLLM's own request."""
    try:
        requests = [_request(_hasher) for _ in range(2)]
        make_private(requests[0], 1)
        for request in requests:
            for token in range(2 * _BLOCK):
                request.append_output_token_ids(token)
        private, public = (list(request.block_hashes) for request in requests)
    except Exception:  # noqa: BLE001 - any difference at all
        return False
    return len(private) == len(public) == 3 and private[0] == public[0] and not set(private[1:]) & set(public[1:])


def _request(hasher: Callable[[Request], list[bytes]]) -> Request:
    """Return a request of one full block and a part of the next."""
    return Request("probe", list(range(_BLOCK + 1)), SamplingParams(max_tokens=100), None, block_hasher=hasher)


def _hasher(request: Request) -> list[bytes]:
    """Return hashes of the blocks that filled up, as vLLM's own hasher does."""
    return [bytes([block]) * 32 for block in range(len(request.block_hashes), request.num_tokens // _BLOCK)]
