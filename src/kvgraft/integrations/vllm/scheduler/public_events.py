"""KV events without private blocks.

vLLM announces every block that it files in its prefix cache, with the tokens of the prompt. Of blocks after a graft that is
untrue for a listener that hashes tokens itself, as routers do: it would expect exact K/V of these tokens, which this server
lacks. Their hashes bear a mark (`private_hashes.py`), by which they are left out here.
"""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

from kvgraft.integrations.vllm.scheduler.private_hashes import is_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def public_events(events: Iterable[Any]) -> Iterator[Any]:
    """Yield vLLM's events, in order, without private blocks: those stored, and those removed.

    Of an event with both kinds, the blocks before the first private one are kept; none where blocks are missing in it
    (sliding windows), so that tokens do not follow from blocks by counting.
    """
    for event in events:
        hashes = getattr(event, "block_hashes", None)
        num_public = _num_public(hashes or ())
        if not hashes or num_public == len(hashes):
            yield event
        elif hasattr(event, "token_ids"):
            if num_public and len(event.token_ids) == len(hashes) * event.block_size:
                yield _head(event, num_public)
        elif public := [block_hash for block_hash in hashes if not is_private(block_hash)]:
            yield _changed(event, block_hashes=public)


def _num_public(hashes: Iterable[bytes | int]) -> int:
    """Return how many hashes stand before the first private one."""
    count = 0
    for block_hash in hashes:
        if is_private(block_hash):
            break
        count += 1
    return count


def _head(event: Any, num_blocks: int) -> Any:  # noqa: ANN401 - vLLM's BlockStored
    extra_keys = getattr(event, "extra_keys", None)
    cut = {"extra_keys": extra_keys[:num_blocks]} if extra_keys is not None else {}
    return _changed(
        event,
        block_hashes=event.block_hashes[:num_blocks],
        token_ids=event.token_ids[: num_blocks * event.block_size],
        **cut,
    )


def _changed(event: Any, **fields: Any) -> Any:  # noqa: ANN401 - one of vLLM's events
    if is_dataclass(event) and not isinstance(event, type):
        return replace(event, **fields)
    from msgspec.structs import replace as replaced

    return replaced(event, **fields)
