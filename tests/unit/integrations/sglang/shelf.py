"""A store that outlives the server of a test, and fails as it is told."""

from __future__ import annotations

import threading

from kvgraft.errors import StoreError
from kvgraft.testing.memory_store import MemoryStore


class Shelf(MemoryStore):
    """`trouble` is raised by everything, and `gate` holds every read up until it is set. Tests damage `objects`."""

    name = "shelf"

    def __init__(self):
        super().__init__()
        self.trouble, self.gate, self.num_reads = None, threading.Event(), 0
        self.gate.set()
        self.touched = threading.Event()

    @property
    def spaces(self):
        return {space for space, _ in self.objects}

    def put(self, space, key, head, body):
        self._fail()
        if not super().put(space, key, head, body):
            return False
        self.objects[space, key] = head, bytearray(body)
        return True

    def keys(self, space):
        self._fail()
        return super().keys(space)

    def heads(self, space, keys):
        self._fail()
        return super().heads(space, keys)

    def read(self, space, key, offset, into):
        self.num_reads += 1
        self.gate.wait(60)
        self._fail()
        super().read(space, key, offset, into)

    def touch(self, space, keys):
        self._fail()
        super().touch(space, keys)
        self.touched.set()

    def _fail(self):
        if self.trouble is not None:
            raise StoreError(self.trouble)
