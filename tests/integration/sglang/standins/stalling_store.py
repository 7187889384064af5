"""A store of files whose reads wait for as long as there is a file `DIR.stalled` beside its directory."""

from __future__ import annotations

import time
from pathlib import Path

from kvgraft.memory.store.file import FileStore


class StallingStore(FileStore):
    """Hangs when it is told to, as a network mount does."""

    def read(self, space, key, offset, into):
        while Path(f"{self.root}.stalled").exists():
            time.sleep(0.01)
        super().read(space, key, offset, into)


def open_store(where, options):
    """Entry point."""
    return StallingStore(where)
