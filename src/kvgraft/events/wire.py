"""KV events as bytes, the way vLLM and SGLang put them on the wire. Needs the extra `router` (msgspec).

A batch is a msgpack array `[timestamp, events, dp_rank]`. An event is a map tagged by `type` (both engines today) or an
array that begins with the tag (older vLLM); both are read, either is written. Unknown fields are skipped, so events of
newer engines are understood as far as they are known here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from kvgraft.errors import IntegrationError, one_line
from kvgraft.events.event import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

SEQUENCE_BYTES = 8
"""Width of the big-endian sequence number between topic and payload."""

_ALWAYS_WRITTEN = frozenset({"parent_block_hash", "lora_id", "medium", "lora_name"})
"""Fields without a default in a reader of vLLM or SGLang; others are left out where they are None."""

_ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *(
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
        ),
        *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}
"""Fields of an event in array form, in order after the tag: vLLM's, of which older versions have the first few."""

_NUM_ALWAYS_IN_ARRAY = {"BlockStored": 6, "BlockRemoved": 2, "AllBlocksCleared": 0}
"""Fields that every reader of arrays wants; later ones are left off after the last that says something."""

_TYPES: dict[str, Callable[..., KVEvent]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one step."""

    timestamp: float
    """Seconds since the epoch."""
    events: tuple[KVEvent, ...]
    dp_rank: int | None = None


def encode_batch(batch: EventBatch, *, as_arrays: bool = False) -> bytes:
    """Return the payload of a batch.

    Args:
        batch: What to encode.
        as_arrays: Write events as arrays, for readers of older vLLM; these know fewer fields.

    Complexity: O(tokens).
    """
    encode: Callable[[KVEvent], Any] = _to_array if as_arrays else as_map
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
    except Exception as error:  # the publisher decides what the bytes are
        raise IntegrationError(f"not a batch of KV events: {one_line(error)}") from error


def as_map(event: KVEvent) -> dict[str, object]:
    """Return an event as it stands in a batch in the form of maps, for engines that encode batches themselves."""
    # Not `asdict`, which copies every token one by one: the interpreter is the engine's, too.
    values = ((field.name, getattr(event, field.name)) for field in fields(event))
    kept = {name: value for name, value in values if value is not None or name in _ALWAYS_WRITTEN}
    return {"type": type(event).__name__, **kept}


def _to_array(event: KVEvent) -> list[object]:
    name = type(event).__name__
    if isinstance(event, BlockStored) and event.cache_salt is not None:
        event = _with_salt_among_keys(event, event.cache_salt)
    values = [getattr(event, field) for field in _ARRAY_FIELDS[name]]
    while len(values) > _NUM_ALWAYS_IN_ARRAY[name] and values[-1] is None:
        values.pop()
    return [name, *values]


def _with_salt_among_keys(event: BlockStored, salt: str) -> BlockStored:
    """Arrays have no place for the salt: as in vLLM's, it stands among the keys of the first page of a prompt.

    Later pages belong to the owner of the page before them.
    """
    keys = list(event.extra_keys or (None,) * len(event.block_hashes))
    if event.parent_block_hash is None and keys:
        keys[0] = (*(keys[0] or ()), salt)
    return replace(event, extra_keys=tuple(keys))


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


def require_msgpack() -> None:
    """Raise `ImportError` that names the extra if batches can be neither written nor read."""
    _msgpack()


def _msgpack() -> ModuleType:
    try:
        import msgspec
    except ImportError as error:
        raise ImportError(
            "KV events on the wire need msgspec: pip install 'kvgraft[router]'", name="msgspec"
        ) from error
    return msgspec.msgpack
