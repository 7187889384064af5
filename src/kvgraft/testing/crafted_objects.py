"""Objects that no engine writes: heads that lie about their length, that no parser likes, or that only look right.

A writer of the store can put such there. None of them may hide another object, hold a thread up or fill the memory.
"""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.memory.store.record import DonorRecord, encode_head
from kvgraft.testing.stored_objects import LAYOUT, SPACE, make_object

if TYPE_CHECKING:
    from collections.abc import Iterator

_LENGTH = struct.Struct("<Q")
_VICTIM = make_object(77, 20)
_FLIPS, _CUTS = 40, 12


@dataclass(frozen=True, slots=True)
class CraftedObject:
    """Bytes in the place of an object. `kind` says what is wrong with them; for some, the key fits the head."""

    kind: str
    key: str
    head: bytes


def crafted_objects(seed: int = 0) -> list[CraftedObject]:
    """Return one of each kind, and so many more with bits flipped and ends cut off at random.

    Args:
        seed: Of what is drawn; others give other flips and cuts, under other keys.
    """
    dice = random.Random(seed)
    kinds = [*_raw_heads(), *_wrong_numbers(), *_drawn(dice)]
    named = [CraftedObject(kind, f"{dice.getrandbits(128):032x}", head) for kind, head in kinds]
    return [*named, *_right_names()]


def _raw_heads() -> Iterator[tuple[str, bytes]]:
    """Yield what is no head at all, and what its parser stumbles over."""
    yield "empty", b""
    yield "short", b"\x01\x02"
    yield "no JSON", _LENGTH.pack(0)
    yield "length of all ones", b"\xff" * 64
    yield "length beyond the end", _LENGTH.pack(1 << 15) + b"{}"
    yield "length beyond any JSON", _LENGTH.pack(1 << 40) + b"{}"
    yield "a picture", b"GIF89a" * 1_000
    for kind, text in {
        "not JSON": b"not json!!",
        "a list": b"[1, 2, 3]",
        "a number": b"17",
        "nothing": b"null",
        "lists within lists": b"[" * 60_000,
        "objects within objects": b'{"a":' * 10_000,
        "lists within kv": b'{"kv":{"data_offsets":' + b"[" * 30_000 + b"]" * 30_000 + b"}}",
        "invalid UTF-8": b'{"kv":"\xff\xfe"}',
        "UTF-16": '{"kv":{"data_offsets":[0,0]}}'.encode("utf-16"),
        "byte order mark": b'\xef\xbb\xbf{"kv":{"data_offsets":[0,0]}}',
        "a number of 5,000 digits": b'{"kv":{"data_offsets":[' + b"9" * 5_000 + b",0]}}",
        "a number of 4,000 digits": b'{"kv":{"data_offsets":[' + b"9" * 4_000 + b",0]}}",
    }.items():
        yield kind, _LENGTH.pack(len(text)) + text


def _wrong_numbers() -> Iterator[tuple[str, bytes]]:
    """Yield heads that are right but for one thing."""
    huge, row = 1 << 62, LAYOUT.bytes_per_token
    values: list[tuple[tuple[str, str], list[object]]] = [
        (("kv", "data_offsets"), [[float("inf")] * 2, [float("nan")] * 2, [-float("inf")] * 2, [-1, -1], [0], [], {}]),
        (
            ("kv", "data_offsets"),
            [None, "00", [None, None], ["0", "1"], [True, True], [0.0, 1.0], [huge, huge], [0, huge]],
        ),
        (
            ("kv", "shape"),
            [None, [], [20], [20, row, 1], [float("inf"), row], [20, float("nan")], [-20, row], ["20", row]],
        ),
        (("kv", "shape"), [[0, row], [20, 0], [huge, row], [20, huge], [1 << 30, 1], [[20], row], [True, row]]),
        (("tokens", "data_offsets"), [[float("inf")] * 2, [-8, 8], [huge, huge], [], None, "12"]),
        (("checksums", "shape"), [[2], [-1], [huge], None]),
        (("__metadata__", "generation"), ["", "-1", "1e3", "9" * 4_000, 0, None, "Infinity"]),
        (("__metadata__", "start_position"), ["", "-5", str(1 << 70), "9" * 5_000, [], "0x10"]),
        (("__metadata__", "namespace"), ["", "zz", "ab" * 65, "ab" * 20_000, 7, None]),
        (("__metadata__", "front"), ["f", "66" * 1_000, 7, {}]),
        (("__metadata__", "layout"), ["", "\ud800", 7, None, ["x"] * 100]),
        (("__metadata__", "page_tokens"), ["0", 256, None]),
    ]
    for (tensor, name), wrong in values:
        for value in wrong:
            described = _described(_VICTIM.head)
            described[tensor][name] = value
            yield f"{tensor}.{name} {str(value)[:24]}", _with_json(described)
    for tensor in ("kv", "tokens", "checksums", "__metadata__"):
        described = _described(_VICTIM.head)
        del described[tensor]
        yield f"no {tensor}", _with_json(described)
        yield f"{tensor} is a list", _with_json({**described, tensor: [1]})
    for claim in (1 << 31, 1 << 40, 1 << 62):
        yield f"a head of {claim} bytes", _with_json({"kv": {"data_offsets": [claim, claim], "shape": [claim // 4, 1]}})


def _drawn(dice: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield a head that was right, with a bit flipped, its end cut off or more at its end."""
    for _ in range(_FLIPS):
        flipped = bytearray(_VICTIM.head)
        place = dice.randrange(len(flipped))
        flipped[place] ^= 1 << dice.randrange(8)
        yield f"bit flipped in byte {place}", bytes(flipped)
    for _ in range(_CUTS):
        end = dice.randrange(len(_VICTIM.head))
        yield f"cut off at {end}", _VICTIM.head[:end]
    yield "a byte too many", _VICTIM.head + b"\0"
    yield "of another object", _VICTIM.head


def _right_names() -> Iterator[CraftedObject]:
    """Yield heads of donors that cannot be, each with the key that it names."""
    tokens = np.arange(20, dtype=np.int32)
    records = {
        "negative tokens": DonorRecord(b"n" * 16, -1 - tokens, 0, 0),
        "no tokens": DonorRecord(b"n" * 16, tokens[:0], 0, 0),
        "negative generation": DonorRecord(b"n" * 16, tokens, -1, 0),
        "negative position": DonorRecord(b"n" * 16, tokens, 0, -7),
        "no namespace": DonorRecord(b"", tokens, 0, 0),
        "a namespace too long": DonorRecord(b"n" * 64, tokens, 0, 0),
        "a front too short": DonorRecord(b"n" * 16, tokens, 0, 0, b"front"),
    }
    for kind, record in records.items():
        sums = np.zeros(record.num_pages, np.uint64)
        yield CraftedObject(kind, record.key, encode_head(record, SPACE, LAYOUT.description, 96, sums))
    rows = {"rows of a tebibyte": 1 << 40, "rows of nothing": 0, "rows of less than nothing": -96}
    for position, (kind, row_bytes) in enumerate(rows.items()):
        record = DonorRecord(b"n" * 16, tokens, 0, position)
        head = encode_head(record, SPACE, LAYOUT.description, row_bytes, np.zeros(1, np.uint64))
        yield CraftedObject(kind, record.key, head)


def _described(head: bytes) -> dict[str, Any]:
    (length,) = _LENGTH.unpack_from(head)
    described: dict[str, Any] = json.loads(head[_LENGTH.size : _LENGTH.size + length])
    return described


def _with_json(described: dict[str, Any]) -> bytes:
    """Return a head with other JSON and the tensors of `_VICTIM`."""
    (length,) = _LENGTH.unpack_from(_VICTIM.head)
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text + _VICTIM.head[_LENGTH.size + length :]
