"""Bodies that lie in several values, for media that limit a value's length or let a second put replace the first.

The head's value begins with a `Parts`, which says where the body lies. Names of parts hold a number that is drawn for every
put: two processes that put the same text at once never mix their bytes, which differ in rounding. A head is written after
its parts, so that a reader of the head finds them.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.errors import CapacityError, StoreError
from kvgraft.memory.store.file_budget import is_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIELDS = struct.Struct("<4s8sQQ")
_MAGIC = b"kvg1"
PARTS_BYTES = _FIELDS.size + 4
"""Length of a packed `Parts`."""
_MOST_PARTS = 1 << 12
"""A head that names more is crafted: names are made of all of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one part.

    Attributes:
        part: Its number.
        start: First byte in the part.
        stop: One after the last.
        into: Where its first byte goes.
    """

    part: int
    start: int
    stop: int
    into: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Where a body lies.

    Attributes:
        drawn: 16 hexadecimal digits, of this put alone.
        part_bytes: Length of every part but the last.
        num_bytes: Length of the body.
    """

    drawn: str
    part_bytes: int
    num_bytes: int

    @classmethod
    def draw(cls, part_bytes: int, num_bytes: int) -> Parts:
        """Begin a put.

        Raises:
            CapacityError: There would be too many parts.
        """
        parts = cls(secrets.token_hex(8), part_bytes, num_bytes)
        if parts.count > _MOST_PARTS:
            raise CapacityError(f"{num_bytes} bytes do not fit into {_MOST_PARTS} values of {part_bytes}")
        return parts

    @classmethod
    def unpack(cls, raw: bytes) -> Parts | None:
        """Read what a head's value begins with; None if that is damaged or something else, or of more parts than may be."""
        if len(raw) < PARTS_BYTES or raw[:4] != _MAGIC:
            return None
        if raw[_FIELDS.size : PARTS_BYTES] != _checksum(raw[: _FIELDS.size]):
            return None
        _, drawn, part_bytes, num_bytes = _FIELDS.unpack_from(raw)
        parts = cls(drawn.hex(), part_bytes, num_bytes)
        return parts if part_bytes and parts.count <= _MOST_PARTS else None

    def pack(self) -> bytes:
        """Write what `unpack` reads."""
        raw = _FIELDS.pack(_MAGIC, bytes.fromhex(self.drawn), self.part_bytes, self.num_bytes)
        return raw + _checksum(raw)

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-self.num_bytes // self.part_bytes)

    def names(self, prefix: str) -> list[str]:
        """Names of all parts."""
        return [f"{prefix}:{self.drawn}:{number}" for number in range(self.count)]

    def spans(self, offset: int, length: int, longest: int) -> Iterator[Span]:
        """Cut `length` bytes of the body from `offset` on where parts end, and where a span would be over `longest`."""
        position = offset
        while position < offset + length:
            part, start = divmod(position, self.part_bytes)
            stop = min(start + longest, start + offset + length - position, self.part_bytes)
            yield Span(part, start, stop, position - offset)
            position += stop - start


def _checksum(raw: bytes) -> bytes:
    return zlib.crc32(raw).to_bytes(4, "little")


def require_name(name: str) -> str:
    """Return the name of a space or an object.

    Raises:
        StoreError: It cannot be one.
    """
    if not is_name(name):
        raise StoreError(f"{name!r} names nothing in a store; names are 1 to 64 lower-case hexadecimal digits")
    return name
