"""Every KV store against the suite that third parties run too."""

from __future__ import annotations

from tests.conformance.file_store import FileStore

from kvgraft.memory import HostKVStore
from kvgraft.testing.store_suite import KVStoreTests


class TestHostKVStore(KVStoreTests):
    def make_store(self, budget_bytes):
        return HostKVStore(budget_bytes)


class TestFileStore(KVStoreTests):
    def make_store(self, budget_bytes):
        return FileStore(budget_bytes=budget_bytes)
