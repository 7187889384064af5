"""gguf's own reader of files, with arrays of the metadata read in one piece.

gguf makes several views of a memory map for every element, and a vocabulary has 100,000 of them: 5 s of processor time for
SmolLM2-135M, of which 0.3 s are left here. transformers then parses the elements, which is faster from bytes, too.
"""

from __future__ import annotations

import struct
from typing import Any

from gguf import GGUFReader, GGUFValueType

_NATIVE = "I"
"""gguf's mark of a file in the machine's byte order."""


class QuickGGUFReader(GGUFReader):
    """Has the fields and tensors of `gguf.GGUFReader`; texts in arrays are `bytes` instead of arrays of them.

    Relies on `_get_field_parts`, which gguf keeps to itself; a gguf that has none reads as slowly as it does.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return a value's size in bytes, its parts, which of these are data, and its types, as gguf does."""
        if raw_type != GGUFValueType.ARRAY or self.byte_order != _NATIVE:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = (self._get(orig_offs, "u4"), self._get(orig_offs + 4, "u8"))
        begin, length = orig_offs + kind.nbytes + count.nbytes, int(count[0])
        types = [GGUFValueType.ARRAY, GGUFValueType(int(kind[0]))]
        if types[1] == GGUFValueType.STRING:
            texts, end = _strings(self.data.data, begin, length)
            parts: list[Any] = [part for text in texts for part in (len(text), text)]
            return end - orig_offs, [kind, count, *parts], list(range(3, 3 + 2 * length, 2)), types[: 1 + bool(length)]
        scalar = self.gguf_scalar_to_np.get(types[1])
        if scalar is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(begin, scalar, length)
        rows = [[value] for value in values.tolist()]
        return (
            begin + values.nbytes - orig_offs,
            [kind, count, *rows],
            list(range(2, 2 + length)),
            types[: 1 + bool(length)],
        )


def _strings(data: memoryview, at: int, count: int) -> tuple[list[bytes], int]:
    """Read `count` strings from `at` on, each its length in 8 bytes and then UTF-8; returns them and where they end."""
    texts = []
    take = struct.Struct("=Q").unpack_from
    for _ in range(count):
        begin = at + 8
        at = begin + take(data, at)[0]
        texts.append(bytes(data[begin:at]))
    return texts, at
