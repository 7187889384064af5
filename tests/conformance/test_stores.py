"""Every store of donors against the suite that third parties run too."""

from __future__ import annotations

import pytest

from kvgraft.memory.store.file import FileStore
from kvgraft.testing.memory_store import MemoryStore
from kvgraft.testing.store_suite import KVStoreTests
from kvgraft.testing.stored_objects import SPACE


class TestMemoryStore(KVStoreTests):
    def make_store(self, max_bytes):
        return MemoryStore(max_bytes)


class TestFileStore(KVStoreTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.root = tmp_path / "store"

    def make_store(self, max_bytes):
        return FileStore(self.root, max_bytes=max_bytes)

    def url(self, max_bytes):
        return f"file:{self.root}?max_bytes={max_bytes}"

    def damage(self, store, key, kind):
        path = store.path(SPACE, key)
        raw = bytearray(path.read_bytes())
        if kind in ("head", "body"):
            raw[1_000 if kind == "head" else -1_000] ^= 4
        path.write_bytes({"truncated": raw[:-1], "empty": b"", "foreign": b"GIF89a" * 1_000}.get(kind, raw))
        return True
