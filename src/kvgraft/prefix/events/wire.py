"""KV events as bytes, the way vLLM and SGLang put them on the wire. Needs the extra `router` (msgspec).

A batch is a msgpack array `[timestamp, events, dp_rank]`. An event is a map tagged by `type` (both engines today) or an
array that begins with the tag (older vLLM); both are read, either is written. Unknown fields are skipped, so events of
newer engines are understood as far as they are known here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from kvgraft.errors import IntegrationError
from kvgraft.prefix.events.event import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

SEQUENCE_BYTES = 8
"""Width of the big-endian sequence number between topic and payload."""

_ALWAYS_WRITTEN = frozenset({"parent_block_hash", "lora_id", "medium", "lora_name"})
"""Fields without a default in a reader of vLLM or SGLang; others are left out where they are None."""

_ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Fields of an event in array form, in order behind the tag."""

_TYPES: dict[str, Callable[..., KVEvent]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one step.

    Attributes:
        timestamp: Seconds since the epoch.
        events: In order.
        dp_rank: Data-parallel rank of the sender.
    """

    timestamp: float
    events: tuple[KVEvent, ...]
    dp_rank: int | None = None


def encode_batch(batch: EventBatch, *, as_arrays: bool = False) -> bytes:
    """Return the payload of a batch.

    Args:
        batch: What to encode.
        as_arrays: Write events as arrays, for readers of older vLLM; these know fewer fields.

    Complexity: O(tokens).
    """
    encode: Callable[[KVEvent], Any] = _to_array if as_arrays else _to_map
    payload: bytes = _msgpack().encode([batch.timestamp, [encode(event) for event in batch.events], batch.dp_rank])
    return payload


def decode_batch(payload: bytes) -> EventBatch:
    """Read the payload of a batch in either form. Events of unknown type are left out.

    Raises:
        IntegrationError: The payload is no batch of events.
    """
    try:
        timestamp, events, *rest = _msgpack().decode(payload)
        decoded = [_from_map(event) if isinstance(event, dict) else _from_array(event) for event in events]
        return EventBatch(float(timestamp), tuple(e for e in decoded if e is not None), rest[0] if rest else None)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise IntegrationError(f"not a batch of KV events: {error}") from error


def _to_map(event: KVEvent) -> dict[str, object]:
    values = {name: value for name, value in asdict(event).items() if value is not None or name in _ALWAYS_WRITTEN}
    return {"type": type(event).__name__, **values}


def _to_array(event: KVEvent) -> list[object]:
    name = type(event).__name__
    return [name, *(getattr(event, field) for field in _ARRAY_FIELDS[name])]


def _from_map(event: dict[str, Any]) -> KVEvent | None:
    return _build(event["type"], event)


def _from_array(event: Sequence[Any]) -> KVEvent | None:
    names = _ARRAY_FIELDS.get(event[0], ())
    return _build(event[0], dict(zip(names, event[1:], strict=False)))


def _build(name: str, values: dict[str, Any]) -> KVEvent | None:
    cls = _TYPES.get(name)
    if cls is None:
        return None
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    kept = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known}
    return cls(**kept)


def _msgpack() -> ModuleType:
    try:
        import msgspec
    except ImportError as error:
        raise ImportError(
            "KV events on the wire need msgspec: pip install 'kvgraft[router]'", name="msgspec"
        ) from error
    return msgspec.msgpack
