"""A stored donor without its K/V, and its wire format: the head of a safetensors file.

Layout of an object: 8 bytes with the length of the JSON that follows, then tensors `checksums` (uint64, one per page of
tokens), `tokens` (int32) and `kv` (uint8, a row per token). Everything before `kv` is the head; head and body together
are a safetensors file that other tools open (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.donors.front import FRONT_BYTES
from kvgraft.errors import StoreError, one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.donor import Donor

FORMAT_VERSION = 4
"""Of objects, and of what computed them: it rises with the format, and where wrong K/V may have been stored before a mend."""
PAGE_TOKENS = 256
"""Tokens that share a checksum; reads are rounded out to whole pages."""

MOST_TOKENS = 1 << 22
"""Longest donor that is stored. It bounds what is read of a head that claims to be longer: 16 MiB of tokens."""

_LENGTH = struct.Struct("<Q")
_LONGEST_JSON = 1 << 16
_MOST_ROW_BYTES = 1 << 24
"""No row of a token is nearly so long: 96 layers of 96 heads of 128 float16 have 4.5 MiB."""
_TOKEN_BYTES, _SUM_BYTES = 4, 8
LONGEST_HEAD_BYTES = 8 + _LONGEST_JSON + _TOKEN_BYTES * MOST_TOKENS + _SUM_BYTES * (MOST_TOKENS // PAGE_TOKENS)
"""No head is longer; stores read no more of one."""
_NAMESPACE_BYTES = 16


@dataclass(frozen=True, eq=False)
class DonorRecord:
    """A donor as stores know it.

    Attributes:
        namespace_key: `Namespace.key` of who may reuse it; the salt itself is not written.
        token_ids: Read-only int32 `(num_tokens,)`.
        generation: See `Donor`.
        start_position: See `Donor`.
        front: See `Donor`.
    """

    namespace_key: bytes
    token_ids: NDArray[np.int32]
    generation: int
    start_position: int
    front: bytes = b""

    @classmethod
    def of(cls, donor: Donor, start: int = 0, stop: int | None = None) -> DonorRecord:
        """The record of tokens `[start, stop)` of a donor, by default of all."""
        return cls(
            donor.namespace.key,
            donor.token_ids[start:stop],
            donor.generation,
            donor.start_position + start,
            donor.front_at(start),
        )

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return len(self.token_ids)

    @property
    def num_pages(self) -> int:
        """Checksums that its K/V have."""
        return _num_pages(self.num_tokens)

    @cached_property
    def key(self) -> str:
        """Name of its object: 32 hexadecimal digits, a hash of everything here, keyed by the namespace."""
        digest = hashlib.blake2b(digest_size=16, key=self.namespace_key, person=b"kvgraft.donor")
        digest.update(struct.pack("<qqqq", self.generation, self.start_position, self.num_tokens, len(self.front)))
        digest.update(self.front)
        digest.update(np.ascontiguousarray(self.token_ids, "<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A decoded head.

    Attributes:
        record: The donor with the body's K/V.
        layout: Description of a row, see `RowLayout.description`.
        bytes_per_token: Length of a row.
        checksums: uint64 `(num_pages,)`.
        num_bytes: Length of the head.
    """

    record: DonorRecord
    layout: str
    bytes_per_token: int
    checksums: NDArray[np.uint64]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoreNews:
    """Changes in a store.

    Attributes:
        added: Donors that it has, in no order; those of this process, too.
        removed: Keys that it has no more.
    """

    added: tuple[DonorRecord, ...] = ()
    removed: tuple[str, ...] = ()


def space_name(*parts: str) -> str:
    """Name the space of those who can use one another's K/V.

    Args:
        *parts: Everything that K/V depend on besides the text: weights, dtype, rotation, layout, engine, rank and world size.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvgraft.space")
    for part in (str(FORMAT_VERSION), str(PAGE_TOKENS), *parts):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def encode_head(
    record: DonorRecord, space: str, layout: str, bytes_per_token: int, checksums: NDArray[np.uint64]
) -> bytes:
    """Write a head. Complexity: O(tokens)."""
    tokens = np.ascontiguousarray(record.token_ids, "<i4").tobytes()
    sums = np.ascontiguousarray(checksums, "<u8").tobytes()
    ends = np.cumsum([0, len(sums), len(tokens), record.num_tokens * bytes_per_token]).tolist()
    described = {
        "__metadata__": {
            "kvgraft": str(FORMAT_VERSION),
            "space": space,
            "namespace": record.namespace_key.hex(),
            "generation": str(record.generation),
            "start_position": str(record.start_position),
            "front": record.front.hex(),
            "page_tokens": str(PAGE_TOKENS),
            "layout": layout,
        },
        "checksums": {"dtype": "U64", "shape": [len(checksums)], "data_offsets": ends[0:2]},
        "tokens": {"dtype": "I32", "shape": [record.num_tokens], "data_offsets": ends[1:3]},
        "kv": {"dtype": "U8", "shape": [record.num_tokens, bytes_per_token], "data_offsets": ends[2:4]},
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    return _LENGTH.pack(len(text)) + text + sums + tokens


def head_size(beginning: bytes) -> int:
    """Length of a head of which at least the JSON is given, or how many bytes must be given first.

    Raises:
        StoreError: This is no head, or no engine writes so long a one.
    """
    if len(beginning) < _LENGTH.size:
        return _LENGTH.size
    behind_json = _json_end(beginning)
    return behind_json if len(beginning) < behind_json else _lengths(beginning)[0]


def object_size(head: bytes) -> int:
    """Length that head and body have together, as the head says.

    Raises:
        StoreError: This is no head, or no engine writes so long a one.
    """
    return _lengths(head)[1]


def decode_head(raw: bytes, space: str, key: str) -> Head:
    """Read a head and prove that it is the one of `key`: its name is recomputed, and every byte is what `encode_head` writes.

    Raises:
        StoreError: It is damaged, foreign, or of another format.

    Complexity: O(tokens).
    """
    try:
        described = _described(raw)
        meta, (num_tokens, bytes_per_token) = described["__metadata__"], _shape(described)
        start = _json_end(raw)
        middle = start + _SUM_BYTES * _num_pages(num_tokens)
        checksums = np.frombuffer(raw[start:middle], "<u8").astype(np.uint64)
        tokens = np.frombuffer(raw[middle:], "<i4").astype(np.int32)
        tokens.flags.writeable = False
        record = DonorRecord(
            bytes.fromhex(meta["namespace"]),
            tokens,
            int(meta["generation"]),
            int(meta["start_position"]),
            bytes.fromhex(meta["front"]),
        )
        is_whole = len(tokens) == num_tokens and _can_be(record) and record.key == key
        is_whole = is_whole and raw == encode_head(record, space, meta["layout"], bytes_per_token, checksums)
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"the head of {key} cannot be read: {one_line(error)}") from error
    if not is_whole:
        raise StoreError(f"the head of {key} is damaged or of another format")
    return Head(record, meta["layout"], bytes_per_token, checksums, len(raw))


def _can_be(record: DonorRecord) -> bool:
    """Whether an engine could have such a donor; one that only looks like it would reach the catalogue."""
    is_placed = record.generation >= 0 and record.start_position >= 0
    is_named = len(record.namespace_key) == _NAMESPACE_BYTES and len(record.front) in (0, FRONT_BYTES)
    return is_placed and is_named and bool((record.token_ids >= 0).all())


def _lengths(beginning: bytes) -> tuple[int, int]:
    """Lengths of a head, and of head and body, by the JSON that it begins with; nothing is read for them but that."""
    described = _described(beginning)
    num_tokens, bytes_per_token = _shape(described)
    head = _SUM_BYTES * _num_pages(num_tokens) + _TOKEN_BYTES * num_tokens
    whole = head + num_tokens * bytes_per_token
    if described["kv"].get("data_offsets") != [head, whole]:
        raise StoreError("this is no head of a stored donor: its lengths contradict each other")
    start = _json_end(beginning)
    return start + head, start + whole


def _shape(described: dict[str, Any]) -> tuple[int, int]:
    """Number and length of a donor's rows: two integers that an engine could have written."""
    shape = described["kv"].get("shape") if isinstance(described.get("kv"), dict) else None
    if isinstance(shape, list) and [type(each) for each in shape] == [int, int]:
        num_tokens, bytes_per_token = shape
        if 0 < num_tokens <= MOST_TOKENS and 0 < bytes_per_token <= _MOST_ROW_BYTES:
            return num_tokens, bytes_per_token
    raise StoreError(
        f"this is no head of a stored donor: it has not 1 to {MOST_TOKENS} rows of 1 to {_MOST_ROW_BYTES} bytes"
    )


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def _json_end(raw: bytes) -> int:
    if len(raw) < _LENGTH.size:
        raise StoreError(f"this is no head of a stored donor: it has {len(raw)} bytes")
    (length,) = _LENGTH.unpack_from(raw)
    if not 0 < length <= _LONGEST_JSON:
        raise StoreError(f"this is no head of a stored donor: it claims {length} bytes of JSON")
    return _LENGTH.size + int(length)


def _described(raw: bytes) -> dict[str, Any]:
    try:
        described = json.loads(raw[_LENGTH.size : _json_end(raw)])
    except (ValueError, RecursionError) as error:
        raise StoreError(f"this is no head of a stored donor: {one_line(error)}") from error
    if not isinstance(described, dict):
        raise StoreError("this is no head of a stored donor: its JSON is no object")
    return described
