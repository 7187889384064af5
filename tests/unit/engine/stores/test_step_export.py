"""Copies for stores on the engine's thread: what cannot be copied is given up, and no step ends for it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvgraft.engine.stores.write_behind import BlockPages, PendingWrite, StepExport
from kvgraft.memory import KVBlock, LayerShape
from kvgraft.memory.store.record import PAGE_TOKENS

NUM_TOKENS = 2 * PAGE_TOKENS + 3
LAYERS = (LayerShape(1, 2),)


class OutOfMemory:
    """Pages of which the second cannot be copied."""

    def copy(self, start, stop, into):
        if start:
            raise MemoryError("no host memory")


def pages(value):
    keys = torch.full((NUM_TOKENS, 1, 2), value)
    return BlockPages(KVBlock((keys,), (keys,)))


def pending(source):
    return PendingWrite(SimpleNamespace(num_tokens=NUM_TOKENS), LAYERS, torch.float32, source)


def test_what_cannot_be_copied_is_given_up_and_the_next_follows():
    export, first, second = StepExport(), pending(OutOfMemory()), pending(pages(1.0))
    export.add(first)
    export.add(second)
    found = [export.step() for _ in range(5)]
    assert found == [None, first, None, None, second]
    assert not export.is_busy
    assert first.read() is None
    assert torch.equal(second.read().keys[0], torch.full((NUM_TOKENS, 1, 2), 1.0))
