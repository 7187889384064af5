"""Servers of one model on this machine, each with KV events that tell of its donors; imported by the scripts."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvgraft.bench.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 16
PATIENCE_S = 300.0
SETTLE_S = 3.0
"""Engines look into a store every two seconds."""


class Server(Protocol):
    """One that runs."""

    def kill(self) -> None:
        """End it with SIGKILL."""

    def __exit__(self, *_: object) -> None:
        """Ask it to end."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Of one server."""

    events: int
    replay: int
    http: int


class Replicas:
    """`kvgraft serve`, several times.

    Args:
        model: Value of `--model`.
        count: How many.
        first_port: Of three per server.
        options: Further ones of `kvgraft serve`.
        share: They share a store, a directory that `reset` empties.
    """

    def __init__(
        self, model: str, count: int, first_port: int, options: Sequence[str] = (), *, share: bool = False
    ) -> None:
        self._model, self._options = model, options
        self._ports = [Ports(*range(first, first + 3)) for first in range(first_port, first_port + 3 * count, 3)]
        self._servers: list[Server] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvgraft-share-") if share else None

    @property
    def urls(self) -> list[str]:
        """Where they answer."""
        return [f"http://127.0.0.1:{ports.http}" for ports in self._ports]

    def start(self) -> None:
        """Start all of them, one after the other."""
        for number in range(len(self._ports)):
            self._servers.append(self._begun(number))

    def kill(self, number: int) -> None:
        """End one with SIGKILL."""
        self._servers[number].kill()

    def restart(self, number: int) -> None:
        """Start one again at the same address."""
        self._servers[number].__exit__()
        self._servers[number] = self._begun(number)

    def stop(self) -> None:
        """End all of them."""
        for server in self._servers:
            server.__exit__()
        self._servers.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def reset(self) -> None:
        """Forget all text everywhere, in the store that they share as well."""
        if self._folder is not None:
            self._empty(Path(self._folder.name))
        for url in self.urls:
            self._forget(url)

    def worker(self, number: int) -> str:
        """Value of `--worker` for one."""
        ends = f"events={self.events(number)},replay=tcp://127.0.0.1:{self._ports[number].replay}"
        return f"{self.urls[number]},{ends},name={self.name(number)}"

    def name(self, number: int) -> str:
        """What it is called in results."""
        return f"replica-{number}"

    def events(self, number: int) -> str:
        """Where one publishes its events."""
        return f"tcp://127.0.0.1:{self._ports[number].events}"

    def fields(self, reuse: str, index: int) -> dict[str, object]:
        """What request `index` says to reuse as much as `reuse` allows."""
        del index
        return {"kvgraft": {"reuse": reuse}}

    def reused(self) -> dict[str, float] | None:
        """Tokens reused so far, `exact` and `shifted`, by the servers' count; None where each answer reports its own."""
        return None

    def store(self) -> str | None:
        """The store that they share."""
        return None if self._folder is None else f"file:{self._folder.name}/kv"

    def _empty(self, folder: Path) -> None:
        """Remove what is stored until nothing more comes: donors are written after their requests."""
        is_first = True
        while is_first or any(folder.rglob("*.safetensors")):
            is_first = False
            for path in folder.rglob("*.safetensors"):
                path.unlink(missing_ok=True)
            time.sleep(SETTLE_S)

    def _forget(self, url: str) -> None:
        post(url + "/reset_prefix_cache")

    def _begun(self, number: int) -> Server:
        ports, store = self._ports[number], self.store()
        kv_events = {"endpoint": f"tcp://*:{ports.events}", "replay_endpoint": f"tcp://*:{ports.replay}"}
        arguments = ["--model", self._model, "--page-size", str(PAGE), "--announce-donors", "true", *self._options]
        arguments += ["--kv-events", json.dumps(kv_events), *(["--store", store] if store else [])]
        return ServerProcess(arguments, port=ports.http).__enter__()


def post(url: str, body: dict[str, object] | None = None) -> bytes:
    """POST JSON and return the answer.

    Raises:
        OSError: There is none, or one of an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        content: bytes = response.read()
    return content
