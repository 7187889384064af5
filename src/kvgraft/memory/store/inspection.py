"""Objects in a store: list them, verify them, copy them for other tools. Works on any store, without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import StoreError, StoreMissError, one_line
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.record import PAGE_TOKENS, Head, decode_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvgraft.memory.store.base import KVStore


@dataclass(frozen=True, slots=True)
class StoredDonor:
    """An object as its head describes it.

    Attributes:
        key: Its name.
        namespace: Keyed hash of who may reuse it, hexadecimal.
        num_tokens: Length of the text.
        num_bytes: Of head and body.
        generation: See `Donor`.
        start_position: See `Donor`.
        problem: Why the head cannot be read; empty if it can.
    """

    key: str
    namespace: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    generation: int = 0
    start_position: int = 0
    problem: str = ""


def donors_in(store: KVStore, space: str) -> Iterator[StoredDonor]:
    """Yield what is in a space, in order of the keys; what goes meanwhile is left out.

    Raises:
        StoreError: The store cannot be asked.
    """
    for key, raw in store.heads(space, sorted(store.keys(space))):
        if raw is None:
            continue
        try:
            head = decode_head(raw, space, key)
        except StoreError as error:
            yield StoredDonor(key, problem=str(error))
            continue
        record = head.record
        yield StoredDonor(
            key,
            record.namespace_key.hex(),
            record.num_tokens,
            head.num_bytes + record.num_tokens * head.bytes_per_token,
            record.generation,
            record.start_position,
        )


def damage_of(store: KVStore, space: str, key: str) -> str:
    """Read all of an object; returns what is wrong with it, or nothing.

    Raises:
        StoreMissError: There is no such object.
        StoreError: The store cannot be asked.
        ImportError: The extra `store` is not installed.

    Complexity: O(bytes), of which a page is in memory.
    """
    raw = _raw_head(store, space, key)
    try:
        head = decode_head(raw, space, key)
    except StoreError as error:
        return str(error)
    try:
        for _ in _pages(store, space, key, head):
            pass
    except _DamagedPageError as error:
        return str(error)
    except StoreMissError as error:
        return f"its body is not whole: {one_line(error)}"
    return ""


def export_donor(store: KVStore, space: str, key: str, file: Path) -> int:
    """Write an object as a safetensors file: tensors `tokens`, `checksums` and `kv`, a row per token.

    Returns:
        Bytes written.

    Raises:
        StoreMissError: There is no such object.
        StoreError: It is damaged, or the file cannot be written; there is no file then.
        ImportError: The extra `store` is not installed.
    """
    raw = _raw_head(store, space, key)
    head = decode_head(raw, space, key)
    begun = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(begun, "xb", opener=_private) as output:
            output.write(raw)
            for rows in _pages(store, space, key, head):
                output.write(rows.data)
            num_bytes = output.tell()
        begun.replace(file)
    except StoreError:
        begun.unlink(missing_ok=True)
        raise
    except OSError as error:
        begun.unlink(missing_ok=True)
        raise StoreError(f"{file} cannot be written: {one_line(error)}") from error
    return num_bytes


class _DamagedPageError(StoreError):
    """A page is not what was put."""


def _raw_head(store: KVStore, space: str, key: str) -> bytes:
    _, raw = next(iter(store.heads(space, [key])))
    if raw is None:
        raise StoreMissError(f"there is no {key} in space {space}")
    return raw


def _pages(store: KVStore, space: str, key: str, head: Head) -> Iterable[np.ndarray]:
    """Read pages one by one, each verified."""
    for first in range(0, head.record.num_tokens, PAGE_TOKENS):
        count = min(PAGE_TOKENS, head.record.num_tokens - first)
        rows = np.empty((count, head.bytes_per_token), np.uint8)
        store.read(space, key, first * head.bytes_per_token, rows.data.cast("B"))
        page = first // PAGE_TOKENS
        if page_checksums(rows, key, page)[0] != head.checksums[page]:
            raise _DamagedPageError(f"tokens {first} to {first + count - 1} of {key} are damaged")
        yield rows


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
