"""A directory of immutable safetensors files, one per object, which processes and replicas share without a server.

    DIR/SPACE/KEY.safetensors

Written under a temporary name, synchronised, then renamed: a reader sees a whole file or none, whenever a process or the
machine stops. Files never change, so readers take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.config.setting import setting
from kvgraft.errors import CapacityError, ConfigError, StoreError, StoreMissError, one_line
from kvgraft.memory.store.base import KVStore
from kvgraft.memory.store.file_budget import (
    FULL,
    LOCK_NAME,
    SUFFIX,
    TEMPORARY,
    FileBudget,
    LockedTotal,
    StoredFile,
    charge,
    described,
    is_name,
    mark,
    spaces_of,
)
from kvgraft.memory.store.options import read_options
from kvgraft.memory.store.record import head_size, object_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_FIRST_READ = 1 << 14
_KNOWN_HEADS = 1 << 16
_LONGEST_WRITE = 1 << 26
_NO_FILE = {errno.ELOOP, errno.ENXIO}
"""Errors of opening a link or a socket."""


@dataclass(frozen=True)
class FileStoreOptions:
    """Options after the question mark of `file:DIR?`."""

    max_bytes: int = setting(
        20 << 30, "bytes that the directory may hold, in all spaces", "File store", low=1, size=True
    )


class FileStore(KVStore):
    """Objects in files. Blocks for as long as the file system does.

    Attributes:
        root: The directory.
        budget: Of its bytes.
    """

    name = "file"

    def __init__(self, root: str | os.PathLike[str], *, max_bytes: int = 20 << 30) -> None:
        """Open a directory, which is made if it is not there; clear away what dead processes have left.

        Args:
            root: Where.
            max_bytes: That all files together may have, in whole blocks of 4 KiB. Holds for all writers together.

        Raises:
            ConfigError: It cannot be used.
        """
        self.root = Path(root).absolute()
        self.budget = FileBudget(self.root, max_bytes)
        # Lengths of heads: files never change, so what was once known stays true.
        self._head_sizes: OrderedDict[tuple[str, str], int] = OrderedDict()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if foreign := _foreign_owner(self.root.stat()):
                raise ConfigError(f"{self.root} {foreign}")
            if os.access(self.root, os.W_OK):  # a replica may only read
                with self.budget.locked() as total:
                    self.budget.recount(total)
            spaces_of(self.root)
            self._device = self.root.stat().st_dev
        except OSError as error:
            raise ConfigError(
                f"{self.root} cannot keep donors ({one_line(error)}); name a directory that you may read"
            ) from error

    def put(self, space: str, key: str, head: bytes, body: memoryview) -> bool:
        """See `KVStore`."""
        final = self._path(space, key)
        size = len(head) + len(body)
        temporary = final.parent / f".{key}.{secrets.token_hex(6)}{TEMPORARY}"
        with self._told("keep", key):
            descriptor = self._begin(final, temporary, size)
            if descriptor is None:
                return False
            try:
                _write(descriptor, head, body)
                is_new = self._publish(final, temporary, size)
            except BaseException:
                self._give_up(temporary, size)
                raise
            finally:
                os.close(descriptor)
            _synchronise(final.parent)
        self._learn(space, key, len(head))
        return is_new

    def keys(self, space: str) -> frozenset[str]:
        """See `KVStore`."""
        return frozenset(file.key for file in self.files(space))

    def heads(self, space: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `KVStore`; a file that is not whole has an empty head."""
        for key in keys:
            with self._told("read", key):
                try:
                    raw = self._head(space, key)
                except FileNotFoundError:
                    self._require_root()
                    raw = None
            yield key, raw

    def read(self, space: str, key: str, offset: int, into: memoryview) -> None:
        """See `KVStore`."""
        with self._told("read", key):
            try:
                descriptor = _open(self._path(space, key))
                try:
                    _fill(descriptor, self._head_size(space, key, descriptor) + offset, into, key)
                finally:
                    os.close(descriptor)
            except FileNotFoundError as error:
                self._require_root()
                raise StoreMissError(f"there is no {key} in {self.root} any more") from error
            except _NotWholeError as error:
                raise StoreMissError(f"{key} in {self.root} is not whole: {error}") from error

    def remove(self, space: str, key: str) -> None:
        """See `KVStore`."""
        path = self._path(space, key)
        self._head_sizes.pop((space, key), None)
        with self._told("remove", key), contextlib.suppress(FileNotFoundError):
            self._require_root()
            path.lstat()  # most are there; spares the lock for those that are not
            with self.budget.locked() as total:
                size = charge(path.lstat().st_size)
                path.unlink()
                total.add(-size)

    def touch(self, space: str, keys: Iterable[str]) -> None:
        """See `KVStore`: notes the time of use, in the time of the file's last change."""
        times = mark(time.time(), is_use=True)
        for key in keys:
            path = self._path(space, key)
            with self._told("touch", key), contextlib.suppress(FileNotFoundError):
                os.utime(path, ns=times, follow_symlinks=False)

    def close(self) -> None:
        """Nothing is open between calls."""

    @property
    def used_bytes(self) -> int:
        """What counts against `max_bytes`: files and what is being written, in whole blocks. Complexity: O(files)."""
        with self._told("count", "files"), self._locked() as total:
            self.budget.recount(total)
            return total.num_bytes or 0

    def spaces(self) -> list[str]:
        """Spaces that have been written to."""
        with self._told("list", "spaces"):
            self._require_root()
            return spaces_of(self.root)

    def files(self, space: str) -> Iterator[StoredFile]:
        """Objects of a space, in no order."""
        with self._told("list", space):
            self._require_root()
            folder = self._folder(space)
            try:
                with os.scandir(folder) as entries:
                    found = [described(entry, space) for entry in entries]
            except FileNotFoundError:
                return
        yield from (file for file in found if file is not None)

    def trim(self, max_bytes: int) -> None:
        """Remove what is worth least until all files have no more than `max_bytes`, and what dead processes have left.

        Raises:
            StoreError: The directory cannot be changed.
            CapacityError: What others are writing is more than that.
        """
        with self._told("clear", "files"):
            self._require_root()
            self.budget.trim(max_bytes)

    def clear(self, space: str) -> int:
        """Remove a space and all that is in it; returns how many objects that were.

        Raises:
            StoreError: It cannot be removed.
        """
        keys = self.keys(space)
        for key in keys:
            self.remove(space, key)
        with self._told("remove", space), self._locked() as total:
            self.budget.recount(total)
            with contextlib.suppress(FileNotFoundError):
                if not os.listdir(self.root / space):
                    (self.root / space).rmdir()
        return len(keys)

    def path(self, space: str, key: str) -> Path:
        """Where an object lies, if it does."""
        return self._path(space, key)

    def _begin(self, final: Path, temporary: Path, size: int) -> int | None:
        """Make a locked temporary file of full length within the budget; None if the object is there already."""
        self._require_root()
        with self.budget.locked() as total:
            if os.path.lexists(final):
                return None
            if not final.parent.is_dir():
                final.parent.mkdir(mode=0o700)
                _synchronise(self.root)
            self.budget.make_room(total, charge(size))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # as long as this is held, the file has a writer
                os.ftruncate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                temporary.unlink()
                total.add(-charge(size))
                raise
            return descriptor

    def _publish(self, final: Path, temporary: Path, size: int) -> bool:
        os.utime(temporary, ns=mark(time.time(), is_use=False))
        with self._locked() as total:
            if os.path.lexists(final):
                temporary.unlink()
                total.add(-charge(size))
                return False
            os.rename(temporary, final)
        return True

    def _give_up(self, temporary: Path, size: int) -> None:
        with contextlib.suppress(OSError, StoreError), self._locked() as total:
            temporary.unlink()
            total.add(-charge(size))

    def _head(self, space: str, key: str) -> bytes:
        try:
            descriptor = _open(self._path(space, key))
            try:
                raw = _beginning(descriptor)
            finally:
                os.close(descriptor)
        except _NotWholeError:
            return b""
        self._learn(space, key, len(raw))
        return raw

    def _head_size(self, space: str, key: str, descriptor: int) -> int:
        known = self._head_sizes.get((space, key))
        if known is None:
            known = len(_beginning(descriptor))
            self._learn(space, key, known)
        return known

    def _learn(self, space: str, key: str, size: int) -> None:
        self._head_sizes[space, key] = size
        if len(self._head_sizes) > _KNOWN_HEADS:
            with contextlib.suppress(KeyError):  # another thread took it
                self._head_sizes.popitem(last=False)

    def _path(self, space: str, key: str) -> Path:
        return self._folder(space) / (self._named(key) + SUFFIX)

    def _folder(self, space: str) -> Path:
        folder = self.root / self._named(space)
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(folder)
            if stat.S_ISLNK(status.st_mode):
                raise StoreError(f"{folder} is a link, and max_bytes does not bound its target; put a folder there")
            if foreign := _foreign_owner(status):
                raise StoreError(f"{folder} {foreign}")
        return folder

    def _named(self, name: str) -> str:
        if not is_name(name):
            raise StoreError(f"{name!r} names nothing in a store; names are 1 to 64 lower-case hexadecimal digits")
        return name

    def _require_root(self) -> None:
        """Raise if the directory itself is gone, an unmounted volume say: then nothing is known of what lies there.

        The mount point that such a volume leaves lies on another device and has no lock file. A volume that is mounted again
        may have another number; it has its lock file.
        """
        is_there = self.root.is_dir()
        if is_there and self.root.stat().st_dev != self._device:
            is_there = os.path.lexists(self.root / LOCK_NAME)
        if not is_there:
            raise StoreError(f"{self.root} is gone; mount it or make it again")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[LockedTotal]:
        """Hold the lock of a directory that is there: nothing is left in an empty mount point."""
        self._require_root()
        with self.budget.locked() as total:
            yield total

    @contextlib.contextmanager
    def _told(self, verb: str, what: str) -> Iterator[None]:
        """Turn what the system says into an error of ours."""
        try:
            yield
        except (StoreError, CapacityError):
            raise
        except OSError as error:
            line = f"{self.root} cannot {verb} {what}: {one_line(error)}"
            if error.errno in FULL:
                raise CapacityError(line) from error
            raise StoreError(line) from error


def open_file_store(where: str, options: Mapping[str, str]) -> FileStore:
    """Make the store of `file:DIR?max_bytes=20GiB`.

    Raises:
        ConfigError: The directory cannot be used, or an option is wrong.
    """
    if not where:
        raise ConfigError("store 'file' needs a directory; write file:DIR")
    chosen = read_options("file", FileStoreOptions, options)
    return FileStore(Path(where).expanduser(), max_bytes=chosen.max_bytes)


def _foreign_owner(status: os.stat_result) -> str:
    """Say why a folder is not used that belongs to neither us nor root: its owner may put any K/V under any name there."""
    own = os.geteuid()
    if status.st_uid in (own, 0):
        return ""
    return (
        f"belongs to user {status.st_uid}, who may put any K/V there; chown it to user {own}, or name another directory"
    )


class _NotWholeError(StoreError):
    """A file is torn, or none of ours."""


def _open(path: Path) -> int:
    """Open an object's file. What is no file is not waited for, as opening a FIFO would be, and is not whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ESTALE:  # another machine has removed it
            raise FileNotFoundError(errno.ENOENT, "gone", str(path)) from error
        if error.errno in _NO_FILE:
            raise _NotWholeError("it is no file") from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _NotWholeError("it is no file")


def _beginning(descriptor: int) -> bytes:
    """Read the head of a whole file: one read for most, more for long ones.

    What a head says of its length is believed only if the file is as long as head and body would be, and before more is read:
    a sparse file claims gigabytes in 4 KiB.
    """
    raw = os.pread(descriptor, _FIRST_READ, 0)
    try:
        raw = _longer(descriptor, raw, head_size(raw))  # with all of the JSON
        size, whole = head_size(raw), object_size(raw)
    except _NotWholeError:
        raise
    except StoreError as error:
        raise _NotWholeError(str(error)) from error
    if os.fstat(descriptor).st_size != whole:
        raise _NotWholeError("it is torn")
    return _longer(descriptor, raw, size)[:size]


def _longer(descriptor: int, raw: bytes, size: int) -> bytes:
    """The first `size` bytes of a file at least, of which it has begun to read some."""
    while len(raw) < size:
        more = os.pread(descriptor, size - len(raw), len(raw))
        if not more:
            raise _NotWholeError("it is torn")
        raw += more
    return raw


def _write(descriptor: int, head: bytes, body: memoryview) -> None:
    for part in (memoryview(head), body):
        done = 0
        while done < len(part):
            done += os.write(descriptor, part[done : done + _LONGEST_WRITE])
    os.fsync(descriptor)


def _fill(descriptor: int, offset: int, into: memoryview, key: str) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            raise StoreMissError(f"{key} has fewer bytes than were asked for")
        done += count


def _synchronise(folder: Path) -> None:
    """Have the names in a folder survive the end of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
