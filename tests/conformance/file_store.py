"""A whole KV store in few lines: one file per block. What CONTRIBUTING's recipe leads to."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from weakref import finalize

import torch

from kvgraft.errors import CapacityError, CorruptCacheError, StoreError
from kvgraft.memory import KVBlock, KVStore


class FileStore(KVStore):
    def __init__(self, *, budget_bytes, pin_memory=False):
        self._budget_bytes = budget_bytes
        self._folder = Path(mkdtemp())
        finalize(self, shutil.rmtree, self._folder)
        self._names = count()
        self._files = {}

    @property
    def budget_bytes(self):
        return self._budget_bytes

    @property
    def used_bytes(self):
        return sum(num_bytes for _, num_bytes in self._files.values())

    def fits(self, num_bytes):
        return self.used_bytes + num_bytes <= self._budget_bytes

    def put(self, key, block):
        if key in self._files:
            raise StoreError(f"there is a block under {key!r} already")
        if not self.fits(block.num_bytes):
            raise CapacityError(f"{block.num_bytes} bytes do not fit")
        path = self._folder / str(next(self._names))
        torch.save([[tensor.clone() for tensor in side] for side in (block.keys, block.values)], path)
        self._files[key] = path, block.num_bytes

    def get(self, key, start=0, length=None):
        keys, values = torch.load(self._find(key))
        block = KVBlock(tuple(keys), tuple(values))
        return block.span(start, block.num_tokens - start if length is None else length)

    def remove(self, key):
        self._find(key).unlink()
        del self._files[key]

    def __len__(self):
        return len(self._files)

    def __contains__(self, key):
        return key in self._files

    def check(self):
        if {path for path, _ in self._files.values()} != set(self._folder.iterdir()):
            raise CorruptCacheError("files and blocks are not the same")

    def _find(self, key):
        if key not in self._files:
            raise StoreError(f"there is no block under {key!r}")
        return self._files[key][0]
