"""Copies computed text out of the engine's cache, which lies in host memory, into memory of donors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.memory.packed import PackedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.memory.block import KVBlock


@dataclass(frozen=True, slots=True, eq=False)
class TextCopy:
    """K/V of some tokens on their way to host memory: `block` has them in memory of their own, or the error."""

    num_bytes: int
    block: Future[KVBlock]

    @classmethod
    def at_hand(cls, block: KVBlock) -> TextCopy:
        """Return K/V that are in host memory already."""
        done: Future[KVBlock] = Future()
        done.set_result(block)
        return cls(block.num_bytes, done)


class TextReader(ABC):
    """Reads tokens of a request's K/V.

    Attributes:
        thread: Does what may take long; work is done in the order in which it was handed in.
    """

    thread: Executor

    @abstractmethod
    def read(self, homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> list[TextCopy]:
        """Begin to copy the K/V of `positions` as they are now, in one part or several; later writes do not change them."""

    def close(self) -> None:
        """Finish what is on its way."""
        self.thread.shutdown()


class _AtOnce(Executor):
    """Does work where it is handed in."""

    def submit(self, work, /, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
        done: Future[object] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the caller finds it in the future
            done.set_exception(error)
        return done


class HostReader(TextReader):
    """Copies at once: where K/V are in host memory, nothing works beside the processor that could."""

    def __init__(self) -> None:
        self.thread = _AtOnce()

    def read(self, homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> list[TextCopy]:
        """See `TextReader.read`."""
        return [TextCopy.at_hand(read_block(homes, positions))]


def layout_of(homes: Sequence[GroupKV]) -> PackedLayout:
    """Return the layout of blocks of all layers, group by group."""
    rows = [layer.rows for home in homes for layer in home.group.layers]
    return PackedLayout(tuple(keys for keys, _ in rows), tuple(values for _, values in rows))


def fill(block: KVBlock, homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> None:
    """Copy the K/V of `positions` into a block of `layout_of(homes)` on the same device, or on the host."""
    for home in homes:
        place = home.place(positions)
        for layer in home.layers:
            keys, values = place.read(layer)
            block.keys[layer].copy_(keys)
            block.values[layer].copy_(values)


def read_block(homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> KVBlock:
    """Copy the K/V of `positions` to host memory, and wait for them."""
    block = layout_of(homes).empty(len(positions))
    fill(block, homes, positions)
    return block
