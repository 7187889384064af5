"""Read what a GGUF file says about itself: single values of its metadata and its table of tensors.

GGUF (versions 2 and 3, little-endian): magic, version, counts, metadata as typed key-value pairs, the tensors' names, shapes,
types and offsets, then their aligned bytes. The layout is that of ggml's GGUF specification. This module reads no weights and
knows no model; a file that ends early or lies about its sizes is an error at once, however large its counts are.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from kvgraft.errors import ModelError, one_line
from kvgraft.models import GGUF_MAGIC, require_magic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the file lists it.

    Attributes:
        name: In llama.cpp's naming.
        elements: Values that it stands for, of any type.
        ggml_type: Number of the type that they are stored in.
        offset: Of its first byte, from the start of the file.
    """

    name: str
    elements: int
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata of a file.

    Attributes:
        values: Numbers, truth values and texts by key; of an array, its length.
        tensors: In the order of the file.
        num_bytes: Size of the file.
    """

    values: Mapping[str, bool | int | float | str]
    tensors: tuple[TensorEntry, ...]
    num_bytes: int

    @property
    def architecture(self) -> str:
        """Name of the architecture, which also begins the keys that describe it."""
        return str(self.values["general.architecture"])

    def of_architecture(self, key: str) -> bool | int | float | str | None:
        """The value of `key` below the architecture's name, None where the file does not give it."""
        return self.values.get(f"{self.architecture}.{key}")


def read_header(name: str, path: Path) -> GGUFHeader:
    """Read the header of the file at `path`, called `name` by the user.

    Complexity: O(bytes of the header); tokens and merges of the vocabulary are stepped over one by one.

    Raises:
        ModelError: The file is empty, no GGUF file, of another version, ends inside its header, or names no architecture.
    """
    try:
        require_magic(name, path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except OSError as error:
        raise ModelError(f"cannot read {name}: {one_line(error)}; check the path and its permissions") from error
    except (struct.error, ValueError, OverflowError) as error:
        raise ModelError(
            f"the header of GGUF file {name} cannot be read: {one_line(error)}; fetch the file again"
        ) from error


def _read(data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data)
    (version,) = cursor.take("I")
    if version not in _VERSIONS:
        raise ValueError(f"it is of version {version}, and 2 and 3 are known")
    num_tensors, num_values = cursor.take("QQ")
    values: dict[str, bool | int | float | str] = {}
    for _ in range(num_values):
        key = cursor.text()
        values[key] = cursor.value(cursor.take("I")[0])
    if "general.architecture" not in values:
        raise ValueError("it names no general.architecture")
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(TensorEntry(name, elements, kind, start + offset) for name, elements, kind, offset in entries)
    return GGUFHeader(values, tensors, len(data))


def _entry(cursor: _Cursor) -> tuple[str, int, int, int]:
    """Name, number of elements, type and offset of the next tensor."""
    name = cursor.text()
    (num_dimensions,) = cursor.take("I")
    elements = prod(cursor.take("Q" * min(num_dimensions, 8)))
    ggml_type, offset = cursor.take("IQ")
    return name, elements, ggml_type, offset


class _Cursor:
    """Reads the file from the magic on. A read that would pass its end raises `struct.error` or `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = len(GGUF_MAGIC)

    def take(self, form: str) -> tuple[int, ...]:
        """Unpack little-endian values of struct's `form`."""
        values = struct.unpack_from("<" + form, self._data, self.position)
        self.position += struct.calcsize("<" + form)
        return values

    def text(self) -> str:
        """Take a string: its length, then UTF-8."""
        begin = self._skip_text()
        return self._data[begin : self.position].decode()

    def value(self, kind: int) -> bool | int | float | str:
        """Take a value of a type, of an array its length."""
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"it has a value of type {kind}, which there is not")
        element, length = self.take("IQ")
        if element == _STRING:
            for _ in range(length):
                self._skip_text()
        elif element in _SCALARS:
            self._skip(length * struct.calcsize("<" + _SCALARS[element]))
        else:
            raise ValueError(f"it has an array of type {element}, which is not known")
        return length

    def _skip_text(self) -> int:
        """Step over a string; returns where its bytes begin."""
        (length,) = self.take("Q")
        begin = self.position
        self._skip(length)
        return begin

    def _skip(self, num_bytes: int) -> None:
        if self.position + num_bytes > len(self._data):
            raise ValueError("it ends early")
        self.position += num_bytes
