"""How many bytes a directory of objects holds, and which go when it holds too many. Processes agree through one locked file.

The directory itself is the truth: temporary files have their full length from the beginning, so that a look at all files
shows what is kept and what is on its way. The number in the lock file saves that look; a killed process leaves it too
high at worst, and the next look mends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.errors import CapacityError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
LOCK_NAME = ".kvgraft-lock"

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that has no room."""
_BLOCK = 4096
_TOTAL = struct.Struct("<q")
_MOST_BYTES = (1 << 63) - 1
_LOCK_WAIT_S = 10.0
"""The lock is held for microseconds, or for a look at all files; a process that holds it longer is stopped or far away."""
_LOW_WATER = 0.95
_FRESH_S = 60.0
"""An object put within this time goes only if nothing else can: its process has hardly had the time to use it."""
_UNUSED_AGES = 4.0
"""An object without a use since it was put counts as this many times as old."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object in the directory.

    Attributes:
        space: Of the object.
        key: Of the object.
        num_bytes: Length of the file.
        used_at: When it was put or last used, in seconds since 1970.
        was_used: Whether it has been used since it was put.
    """

    space: str
    key: str
    num_bytes: int
    used_at: float
    was_used: bool


def charge(num_bytes: int) -> int:
    """What a file of this length takes of the budget: whole blocks."""
    return -(-num_bytes // _BLOCK) * _BLOCK


def mark(now: float, *, is_use: bool) -> tuple[int, int]:
    """Times for `os.utime`, in nanoseconds: the millisecond is odd in those of objects that were used."""
    milliseconds = int(now * 1000) // 2 * 2 + is_use
    return (milliseconds * 1_000_000,) * 2


class FileBudget:
    """Bytes of a directory. Thread-safe, and safe among processes.

    An object's value is how likely it is used again, judged by the time since its last use; one that was never used since it
    was put counts as four times as old, so that texts that came once leave before those that came twice. Size plays no
    part: the K/V of a token cost about the same to compute and to keep in every donor. A file that alone is longer than the
    limit goes first.

    Attributes:
        num_evicted: Objects that this process has removed to make room.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.num_evicted = 0
        self._root = root
        self._max_bytes = max_bytes

    @contextlib.contextmanager
    def locked(self) -> Iterator[LockedTotal]:
        """Hold the directory's lock: among threads and processes one at a time.

        Raises:
            StoreError: Another process holds it for too long.
            OSError: The directory is gone or not ours.
        """
        # Opened anew each time: locks belong to open files, so this one excludes threads of this process, too.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._root / LOCK_NAME, flags, 0o600)
        try:
            _lock(descriptor, time.monotonic() + _LOCK_WAIT_S)
            try:
                yield LockedTotal(descriptor)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves it to a child that was forked meanwhile
        finally:
            os.close(descriptor)

    def recount(self, total: LockedTotal) -> list[StoredFile]:
        """Look at all files: correct the total, remove temporary files of the dead. Complexity: O(files)."""
        files, num_bytes, now = [], 0, time.time()
        for space in spaces_of(self._root):
            for entry in _entries(self._root / space):
                if entry.name.endswith(TEMPORARY):
                    num_bytes += _bytes_under_way(entry)
                elif (file := described(entry, space)) is not None:
                    num_bytes += charge(file.num_bytes)
                    files.append(_in_the_present(file, entry, now))
        total.set(num_bytes)
        return files

    def make_room(self, total: LockedTotal, num_bytes: int) -> None:
        """Count `num_bytes` in, after removing what is worth least if they do not fit.

        Raises:
            CapacityError: They do not fit.

        Complexity: O(1) if they fit, else O(files log files); it leaves some room, so that not every call meets that.
        """
        if num_bytes > self._max_bytes:
            raise CapacityError(f"{num_bytes} bytes do not fit into {self._max_bytes}; raise max_bytes")
        if total.num_bytes is None or total.num_bytes + num_bytes > self._max_bytes:
            self._evict(total, self.recount(total), self._max_bytes - num_bytes)
        total.add(num_bytes)

    def trim(self, max_bytes: int) -> None:
        """Remove what is worth least until no more than `max_bytes` are left.

        Raises:
            CapacityError: What other processes are writing is more than that.
        """
        with self.locked() as total:
            self._evict(total, self.recount(total), max_bytes)

    def _evict(self, total: LockedTotal, files: list[StoredFile], limit: int) -> None:
        now = time.time()
        low_water = limit - int((1 - _LOW_WATER) * self._max_bytes)
        for file in sorted(files, key=lambda file: (file.num_bytes <= self._max_bytes, *_value(file, now))):
            held, size = total.num_bytes or 0, charge(file.num_bytes)
            is_needed = held > limit
            if not is_needed and (held - size < low_water or _is_fresh(file, now)):
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / file.space / (file.key + SUFFIX))
            total.add(-size)
            self.num_evicted += 1
        if (total.num_bytes or 0) > limit:
            raise CapacityError(f"{self._root} has no room: others are writing all that it may hold; try again later")


class LockedTotal:
    """The number of bytes in the lock file, while the lock is held.

    Attributes:
        num_bytes: None if not counted yet.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        raw = os.pread(descriptor, _TOTAL.size + 1, 0)
        self.num_bytes: int | None = _TOTAL.unpack(raw)[0] if len(raw) == _TOTAL.size else None
        if self.num_bytes is not None and self.num_bytes < 0:
            self.num_bytes = None

    def set(self, num_bytes: int) -> None:
        """Write it; sparse files may claim more than a number has room for. On a full disk the next one counts anew."""
        self.num_bytes = max(num_bytes, 0)
        try:
            os.pwrite(self._descriptor, _TOTAL.pack(min(self.num_bytes, _MOST_BYTES)), 0)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.ftruncate(self._descriptor, 0)

    def add(self, num_bytes: int) -> None:
        """Change it, if it has been counted."""
        if self.num_bytes is not None:
            self.set(self.num_bytes + num_bytes)


def spaces_of(root: Path) -> list[str]:
    """Folders of `root` that are spaces."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if is_name(entry.name) and entry.is_dir(follow_symlinks=False))


def is_name(text: str) -> bool:
    """Whether this can be the name of a space or an object."""
    return 0 < len(text) <= 64 and not text.strip("0123456789abcdef")


def described(entry: os.DirEntry[str], space: str) -> StoredFile | None:
    """The object that a file is; None if it is none or gone."""
    key = entry.name.removesuffix(SUFFIX)
    if key == entry.name or not is_name(key):
        return None
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    was_used = status.st_mtime_ns // 1_000_000 % 2 == 1
    return StoredFile(space, key, status.st_size, status.st_mtime, was_used)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _in_the_present(file: StoredFile, entry: os.DirEntry[str], now: float) -> StoredFile:
    """Take what was used in a time that is still to come for used now, so that it ages as the others do.

    A clock went back, or another machine's goes far ahead. A file with a time that cannot be changed counts as never used.
    """
    if file.used_at <= now + _FRESH_S:
        return file
    try:
        os.utime(entry.path, ns=mark(now, is_use=file.was_used), follow_symlinks=False)
    except OSError:
        return replace(file, used_at=0.0)
    return replace(file, used_at=now)


def _value(file: StoredFile, now: float) -> tuple[bool, float]:
    """What goes first is smallest."""
    age = max(now - file.used_at, 0.0)
    return _is_fresh(file, now), -age * (1.0 if file.was_used else _UNUSED_AGES)


def _is_fresh(file: StoredFile, now: float) -> bool:
    return now - file.used_at < _FRESH_S


def _bytes_under_way(entry: os.DirEntry[str]) -> int:
    """Return the bytes of a temporary file; remove it if its writer is dead, for a dead process holds no lock."""
    try:
        descriptor = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(entry.path)
    except FileNotFoundError:
        return 0
    except OSError:
        return charge(os.fstat(descriptor).st_size)
    else:
        logger.info("removed %s, which a process that is gone has left", entry.name)
        return 0
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    pause = 0.0005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreError(f"another process has held the directory's lock for {_LOCK_WAIT_S:.0f} s") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        else:
            return
