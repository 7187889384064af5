"""A read of a stored donor that requests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.store.tier import Fetch


class SharedRead:
    """A `Read` that is given up when the last request that joined has cancelled it. Not thread-safe."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._num_users = 0

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._fetch.is_done

    @property
    def is_cancelled(self) -> bool:
        """Whether it was given up."""
        return self._fetch.is_cancelled

    def join(self) -> SharedRead:
        """Count one more request, which calls `cancel` once."""
        self._num_users += 1
        return self

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it takes longer."""
        return self._fetch.wait(timeout_s)

    def block(self) -> KVBlock:
        """Return the K/V once it has ended; raises `StoreError` if it failed."""
        return self._fetch.block()

    def cancel(self) -> None:
        """Count one request less."""
        self._num_users -= 1
        if not self._num_users and not self._fetch.is_done:
            self._fetch.cancel()
