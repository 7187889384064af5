"""Start `kvgraft serve` as a process of its own and end it again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_URL = re.compile(r"https?://[^\s/]+:\d+")
_START_SECONDS = 180.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05


class ServerProcess:
    """A server on this machine; a context manager that starts it and ends it.

    Args:
        arguments: Of `kvgraft serve`, without host and port.
        environ: Variables besides those of this process.
        port: 0 takes a free one.
        command: What to start; `router` is a server, too.

    Raises:
        ConfigError: It does not start; says what it printed last.
    """

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str] | None = None, port: int = 0, command: str = "serve"
    ) -> None:
        self._command = [
            sys.executable,
            "-m",
            "kvgraft",
            command,
            *arguments,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        self._environ = os.environ | dict(environ or {})
        self.url = ""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="kvgraft-bench-")
        self._output, self._log = (Path(self._folder.name) / name for name in ("output", "log"))
        # Files, not pipes: the server goes on though nothing reads them.
        with self._output.open("wb") as output, self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=log, env=self._environ)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and end it with SIGKILL if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def log_tail(self, lines: int = 20) -> str:
        """Return what it printed last."""
        text = self._output.read_text(errors="replace") + self._log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                last = " ".join(self.log_tail(1).split()) or "nothing"
                raise ConfigError(
                    f"kvgraft {self._command[3]} ended with code {self._process.returncode}; it said: {last}"
                )
            if not self.url:
                found = _URL.search(self._output.read_text(errors="replace"))
                self.url = found.group() if found else ""
            elif _answers(self.url + "/health"):
                return
            time.sleep(_POLL_SECONDS)
        raise ConfigError(
            f"kvgraft serve was not ready after {_START_SECONDS:.0f} s; try it with the same arguments by hand"
        )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl+C does, so that servers that it started end too; for commands, not libraries."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process; Linux only, 0 elsewhere or if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
