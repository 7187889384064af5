"""What `store_bandwidth.py` measures, of a Redis server and a Mooncake Store that it starts on loopback.

    PYTHONPATH=src python benchmarks/store_remote.py --stores redis,mooncake [options of store_bandwidth.py]

`plain` is the client doing the same ranges: for Redis one GETRANGE per value, copied into the buffer; for Mooncake one
`get_into_ranges` into memory that is registered for it. The memory that Mooncake reads from is lent by another process. Needs
redis-server and the extras `redis` and `mooncake`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.memory.store import open_store
from kvgraft.testing.stored_objects import SPACE
from store_bandwidth import MEDIA, Medium, main

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.memory.store.parts import Parts
    from kvgraft.testing.stored_objects import StoredObject

_PATIENCE_S = 60.0
_LENDER = """
import sys, time
from kvgraft.memory.store import open_store
store = open_store(sys.argv[1])
time.sleep(1e6)
"""


class ServerMedium(Medium):
    """A store on servers that are started for it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvgraft-remote-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.store: Any = None

    def start(self, *command: str) -> None:
        """Run a server until the end; it writes into a folder that goes."""
        with (Path(self._folder.name) / "log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, cwd=self._folder.name, stdout=log, stderr=log))

    def parts(self, wanted: StoredObject) -> tuple[Parts, list[str]]:
        """Where the body lies, by the store's own notes of the last read or head."""
        if (SPACE, wanted.key) not in self.store._known:
            next(iter(self.store.heads(SPACE, [wanted.key])))
        parts = self.store._known[SPACE, wanted.key]
        return parts, parts.names(self.store._body_prefix(SPACE, wanted.key))

    def close(self) -> None:
        """See `Medium`."""
        if self.store is not None:
            self.store.close()
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._folder.cleanup()


class RedisMedium(ServerMedium):
    """`GETRANGE`."""

    def __init__(self, _folder: Path | None) -> None:
        super().__init__()
        import redis

        port = free_port()
        self.start("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory", "2gb")
        self._client = redis.Redis(port=port, protocol=2)
        until(self._client.ping)
        self.store = open_store(f"redis://127.0.0.1:{port}?timeout_s=60")

    def plain(self, wanted: StoredObject, offset: int, into: memoryview) -> None:
        """See `Medium`."""
        parts, names = self.parts(wanted)
        for span in parts.spans(offset, len(into), parts.part_bytes):
            piece = self._client.getrange(names[span.part], span.start, span.stop - 1)
            into[span.into : span.into + len(piece)] = piece


class MooncakeMedium(ServerMedium):
    """`get_into_ranges`."""

    def __init__(self, _folder: Path | None) -> None:
        super().__init__()
        port, admin = free_port(), free_port()
        where = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1")
        self.start(sys.executable, "-m", "mooncake.cli", f"--rpc_port={port}", f"--metrics_port={admin}", *where)
        until(lambda: fetched(admin, "/health"))
        url = f"mooncake://127.0.0.1:{port}?admin_port={admin}&timeout_s=60"
        self.start(sys.executable, "-c", _LENDER, f"{url}&segment_bytes=2GiB")
        until(lambda: fetched(admin, "/get_segments_detail")["segments"])
        self.store = open_store(url)

    def plain(self, wanted: StoredObject, offset: int, into: memoryview) -> None:
        """See `Medium`."""
        import numpy as np

        parts, names = self.parts(wanted)
        client, place = self.store._client, np.frombuffer(into, np.uint8).ctypes.data
        client.register_buffer(place, len(into))
        spans = list(parts.spans(offset, len(into), parts.part_bytes))
        keys, sizes = [names[span.part] for span in spans], [[span.stop - span.start] for span in spans]
        targets, starts = [[span.into] for span in spans], [[span.start] for span in spans]
        found = client.get_into_ranges([place], [keys], [targets], [starts], [sizes])
        client.unregister_buffer(place)
        if found != [sizes]:
            raise SystemExit(f"Mooncake answers {found}")


def fetched(port: int, path: str) -> Any:  # noqa: ANN401 - JSON
    """What the master's HTTP service says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.load(answer)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(is_ready: Callable[[], object]) -> None:
    """Wait for a server."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if is_ready():
                return
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


MEDIA.update(redis=RedisMedium, mooncake=MooncakeMedium)

if __name__ == "__main__":
    sys.exit(main())
