"""Objects of stores that every process makes alike from a number, and a process that puts them until it is killed.

    python -m kvgraft.testing.stored_objects URL FIRST COUNT [TOKENS]

puts objects FIRST, FIRST + 1, ... and prints the number of each when the store has acknowledged it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import CapacityError, StoreError, StoreMissError
from kvgraft.memory.store import open_store
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.layout import Field, RowLayout
from kvgraft.memory.store.record import DonorRecord, decode_head, encode_head, space_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.memory.store import KVStore

LAYOUT = RowLayout((Field(2, 4, torch.float32), Field(1, 6, torch.bfloat16)) * 2, rope="none")
"""Rows of 96 bytes: the fields of two layers differ in shape and precision, and not all end where the next begins."""

SPACE = space_name("kvgraft.testing", LAYOUT.description)


@dataclass(frozen=True, eq=False)
class StoredObject:
    """An object to put into a store: the donor, its encoded head, and uint8 rows `(num_tokens, bytes_per_token)`."""

    record: DonorRecord
    head: bytes
    rows: NDArray[np.uint8]

    @property
    def key(self) -> str:
        """Its name."""
        return self.record.key

    @property
    def body(self) -> memoryview:
        """The rows as the contract wants them."""
        return self.rows.data.cast("B")

    @property
    def num_bytes(self) -> int:
        """Of head and body."""
        return len(self.head) + self.rows.nbytes


def make_object(number: int, num_tokens: int = 300, *, space: str = SPACE, layout: RowLayout = LAYOUT) -> StoredObject:
    """Make the object of a number; other numbers give other tokens, rows and keys."""
    generator = np.random.default_rng(number)
    tokens = generator.integers(0, 50_000, num_tokens, dtype=np.int32)
    rows = generator.integers(0, 256, (num_tokens, layout.bytes_per_token), dtype=np.uint8)
    block = layout.unpack(rows)
    record = DonorRecord(b"n" * 16, tokens, generation=number % 3, start_position=number % 1000)
    rows = layout.pack(block)  # what lies between fields is 0
    sums = page_checksums(rows, record.key)
    return StoredObject(record, encode_head(record, space, layout.description, layout.bytes_per_token, sums), rows)


def fault_of(store: KVStore, wanted: StoredObject, *, space: str = SPACE) -> str:
    """Return the fault of an object in a store: none (``), `lost`, `torn`, or `wrong`, which must never be.

    Raises:
        StoreError: The store cannot be asked.
    """
    _, head = next(iter(store.heads(space, [wanted.key])))
    if head is None:
        return "lost"
    into = np.empty_like(wanted.rows)
    try:
        decode_head(head, space, wanted.key)
        store.read(space, wanted.key, 0, into.data.cast("B"))
    except StoreMissError:
        return "torn"
    return "" if head == wanted.head and np.array_equal(into, wanted.rows) else "wrong"


def main() -> int:
    """Put objects and say so."""
    url, first, count, *rest = sys.argv[1:]
    num_tokens = int(rest[0]) if rest else 300
    store = open_store(url)
    for number in range(int(first), int(first) + int(count)):
        wanted = make_object(number, num_tokens)
        try:
            store.put(SPACE, wanted.key, wanted.head, wanted.body)
        except CapacityError:
            continue
        except StoreError as error:
            sys.stderr.write(f"{error}\n")
            continue
        os.write(1, b"%d\n" % number)  # at once, so that a kill loses none
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
