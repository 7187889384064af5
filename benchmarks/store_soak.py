"""Many store operations with injected faults: each is a counted miss, nothing acknowledged is lost, nothing leaks.

    PYTHONPATH=src python benchmarks/store_soak.py [--operations 100000] [--dir DIR]

Donors are written, read, looked for, touched and removed through the tier over a directory that holds about half of them.
Faults: files truncated, a bit flipped, a foreign file, files deleted by others; `ENOSPC` and `EIO` from the system in the
middle of a write, in `fsync` and in a read; a store that is full, slow, gone for a while; bits flipped on the way. A
dictionary knows what the store has acknowledged and what has been done to it since. Prints one JSON object; exit code 1 if
anything was not as it should be.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.server_process import rss_bytes
from kvgraft.errors import StoreError
from kvgraft.memory.store import file as file_module
from kvgraft.memory.store.file import FileStore
from kvgraft.memory.store.tier import StoreFeed, StoreReader, StoreWriter
from kvgraft.testing.memory_store import Faults, FaultyStore
from kvgraft.testing.stored_objects import LAYOUT, SPACE, StoredObject, make_object

if TYPE_CHECKING:
    from collections.abc import Callable

_OBJECTS = 400
_MAX_BYTES = 5 << 20
_PATIENCE_S = 120.0
_RENEWED_EVERY = 5_000
_CHECKED_EVERY = 500
_MB = 1 << 20


class FaultySystem:
    """The module `os`; some of its calls fail by chance while `is_on`."""

    def __init__(self, dice: random.Random) -> None:
        self.is_on = True
        self.happened: Counter[str] = Counter()
        self._dice = dice

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all that `os` has
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write half and be full."""
        if self._strikes("ENOSPC in write", 0.01):
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Find the medium broken. Does not wait for the disk: what survives a crash is another benchmark's subject."""
        if self._strikes("EIO in fsync", 0.01):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        """Fail, or give less than was asked for, which is no fault."""
        if self._strikes("EIO in read", 0.01):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, [buffers[0][: self._dice.randint(1, len(buffers[0]))]], offset)

    def _strikes(self, fault: str, chance: float) -> bool:
        is_now = self.is_on and self._dice.random() < chance
        self.happened[fault] += is_now
        return is_now


class Soak:
    """The store, what uses it, and what must be in it.

    Attributes:
        kept: Acknowledged and not lost since for a known reason.
        violations: What was not as it should be; empty is good.
    """

    def __init__(self, root: Path, seed: int, system: FaultySystem) -> None:
        self.dice = random.Random(seed)
        self.root = root
        self.system = system
        self.now = 0.0
        self.objects = [make_object(number, 60 + 5 * (number % 50)) for number in range(_OBJECTS)]
        self.numbers = {wanted.key: number for number, wanted in enumerate(self.objects)}
        self.kept: set[str] = set()
        self.damaged: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.violations: list[str] = []
        self.faults = Faults(seed=seed, hang_s=0.002, chance=0.01)
        for fault, methods in {
            "fail": ("put", "heads", "read", "keys"),
            "hang": ("put", "heads", "read"),
            "corrupt": ("heads", "read"),
            "truncate": ("heads", "read"),
            "full": ("put",),
        }.items():
            getattr(self.faults, fault).update(methods)
        self.file = FileStore(root, max_bytes=_MAX_BYTES)
        self.foreign = set(threading.enumerate())
        self.open()

    def open(self) -> None:
        """Begin anew with reader, writer and feed, as a process would."""
        self.store = FaultyStore(self.file, self.faults)
        self.reader = StoreReader(self.store, SPACE, LAYOUT, max_pending_bytes=1 << 20, clock=lambda: self.now)
        self.writer = StoreWriter(self.store, SPACE, LAYOUT, max_queued_bytes=1 << 20)
        present = self.present()
        self.feed = StoreFeed(self.store, [SPACE], interval_s=3600.0, max_pending=10 * _OBJECTS)
        self.await_look(present)

    def close(self) -> None:
        """Add up what was counted."""
        self.writer.close(_PATIENCE_S)
        self.reader.close()
        self.feed.close()
        for kind, counters in (("read", self.reader.counters), ("write", self.writer.counters)):
            for name in counters.__slots__:
                self.totals[f"{kind} {name}"] += getattr(counters, name)
        self.totals["feed corrupt"] += self.feed.num_corrupt
        self.totals["feed errors"] += self.feed.num_errors
        _wait_for_threads(self.foreign)

    def step(self) -> None:
        """Do one thing; the clock of the reader goes on by a second."""
        self.now += 1.0
        wanted = self.dice.choice(self.objects)
        step: Callable[[StoredObject], None] = self.dice.choices(
            (self.write, self.read, self.remove, self.touch, self.damage, self.vanish, self.look),
            (30, 60, 2, 4, 3, 0.2, 0.2),
        )[0]
        step(wanted)
        self.counts[step.__name__] += 1

    def write(self, wanted: StoredObject) -> None:
        """Store a donor; what leaves for it was counted."""
        evicted, reasons = self.file.budget.num_evicted, self.num_faults()
        self.writer.offer(wanted.record, lambda: LAYOUT.unpack(wanted.rows))
        self.require(self.writer.flush(_PATIENCE_S), "a write takes for ever")
        (written,) = self.writer.take_written()
        present = self.present()
        gone = (self.kept | self.damaged) - present - {wanted.key}
        if wanted.key in self.damaged and self.is_whole(wanted):
            self.damaged.discard(wanted.key)  # written anew
        self.damaged -= {wanted.key} - present
        if written.is_stored and wanted.key not in self.damaged:  # a body that is damaged shows when it is read
            self.kept.add(wanted.key)
        if wanted.key in self.kept - present:  # its head could not be read, and writing it anew failed
            self.require(self.num_faults() > reasons, "a donor was removed without a fault")
            self.forget(wanted.key)
        evicted = self.file.budget.num_evicted - evicted
        self.require(len(gone) <= evicted, f"{len(gone)} donors are gone, {evicted} were evicted")
        self.require(not written.is_stored or wanted.key in present, "what was acknowledged is not there")
        self.kept -= gone
        self.damaged -= gone

    def read(self, wanted: StoredObject) -> None:
        """Fetch a span: right, or a miss that is counted and has a reason."""
        before, reasons = self.counted(), self.num_faults()
        start = self.dice.randrange(wanted.record.num_tokens)
        length = self.dice.randint(1, wanted.record.num_tokens - start)
        fetch = self.reader.fetch(wanted.key, start, length)
        self.require(fetch.wait(_PATIENCE_S), "a read takes for ever")
        self.require(self.counted() == before + 1, "a fetch was not counted once")
        try:
            rows = LAYOUT.pack(fetch.block())
        except StoreError:
            has_reason = wanted.key not in self.kept or self.num_faults() > reasons or self.reader.is_resting
            has_reason = has_reason or "is not asked" in str(fetch._error)
            self.require(has_reason, "an acknowledged donor was missed without a fault")
            if wanted.key not in self.present():
                self.forget(wanted.key)  # found damaged, on the disk or on the way, and removed
        else:
            self.require(np.array_equal(rows, wanted.rows[start : start + length]), "WRONG BYTES WERE SERVED")
            self.counts["hits"] += 1

    def remove(self, wanted: StoredObject) -> None:
        """As a user might."""
        self.file.remove(SPACE, wanted.key)
        self.forget(wanted.key)

    def touch(self, wanted: StoredObject) -> None:
        """Note a use."""
        self.store.touch(SPACE, [wanted.key])

    def damage(self, wanted: StoredObject) -> None:
        """Do something to its file that no store does."""
        path = self.file.path(SPACE, wanted.key)
        if not path.exists():
            return
        kind = self.dice.choice(("truncate", "flip", "foreign", "delete"))
        self.counts[f"damage: {kind}"] += 1
        if kind == "delete":
            path.unlink()
            self.forget(wanted.key)
            return
        raw = bytearray(path.read_bytes())
        if kind == "truncate":
            del raw[int(self.dice.random() * len(raw)) :]
        elif kind == "flip":
            self.faults.flip(raw)
        else:
            raw = bytearray(self.dice.randbytes(self.dice.randint(0, 20_000)))
        path.write_bytes(raw)
        self.kept.discard(wanted.key)
        self.damaged.add(wanted.key)

    def vanish(self, wanted: StoredObject) -> None:
        """Have the directory unmounted while a donor is read, and mounted again."""
        away = self.root.with_name(self.root.name + "-away")
        self.root.rename(away)
        before = self.counted()
        fetch = self.reader.fetch(wanted.key, 0, wanted.record.num_tokens)
        self.require(fetch.wait(_PATIENCE_S), "a read takes for ever")
        self.require(not self.reader.counters.num_bytes or self.counted() == before + 1, "a fetch was not counted once")
        try:
            fetch.block()
        except StoreError:
            pass
        else:
            self.require(False, "something was read of a directory that is not there")
        away.rename(self.root)

    def look(self, _wanted: StoredObject) -> None:
        """Have the feed look, which removes heads that it cannot read."""
        self.await_look(self.present())

    def await_look(self, present: set[str]) -> None:
        """Wait until the feed has looked and rests."""
        self.require(self.feed.look(_PATIENCE_S), "a look takes for ever")
        for record in self.feed.news(10 * _OBJECTS).added:
            self.require(record.key in self.numbers, "the feed reports a donor that was never put")
        for key in present - self.present():
            self.forget(key)

    def check(self) -> None:
        """Verify, without faults, that what was acknowledged is there and right, and that the budget holds."""
        self.system.is_on = False
        present = self.present()
        self.require(self.kept <= present, f"{len(self.kept - present)} acknowledged donors are lost")
        for key in self.dice.sample(sorted(self.kept), min(20, len(self.kept))):
            self.require(self.is_whole(self.objects[self.numbers[key]]), "an acknowledged donor is not what it was")
        listed = sum(-(-path.stat().st_size // 4096) * 4096 for path in self.root.glob("*/*"))
        self.require(listed <= _MAX_BYTES, f"{listed} bytes lie there, {_MAX_BYTES} may")
        self.require(not list(self.root.glob("*/.*")), "a temporary file was left")
        self.system.is_on = True

    def present(self) -> set[str]:
        """Keys in the directory, seen without faults."""
        return set(self.file.keys(SPACE))

    def is_whole(self, wanted: StoredObject) -> bool:
        """Whether its file is, byte for byte, what was put."""
        path = self.file.path(SPACE, wanted.key)
        return path.exists() and path.read_bytes() == wanted.head + wanted.rows.tobytes()

    def forget(self, key: str) -> None:
        """Note that it is gone for a known reason."""
        self.kept.discard(key)
        self.damaged.discard(key)

    def counted(self) -> int:
        """Fetches that have been counted."""
        counters = self.reader.counters
        names = ("hits", "missing", "corrupt", "failed", "refused", "cancelled")
        return sum(getattr(counters, name) for name in names)

    def num_faults(self) -> int:
        """Faults so far."""
        return self.faults.happened.total() + self.system.happened.total()

    def require(self, is_so: bool, problem: str) -> None:
        """Note what is not as it should be."""
        if not is_so:
            self.violations.append(problem)


def soak(root: Path, operations: int, seed: int, system: FaultySystem) -> dict[str, object]:
    """Run, and tell what happened."""
    run, started = Soak(root, seed, system), time.perf_counter()
    usage: list[tuple[int, int, int]] = []
    for operation in range(operations):
        run.step()
        if operation % _CHECKED_EVERY == 0:
            run.check()
        if operation % _RENEWED_EVERY == _RENEWED_EVERY - 1 or operation == operations - 1:
            run.close()
            gc.collect()
            usage.append((_open_files(), threading.active_count(), rss_bytes(os.getpid())))
            run.open()
    run.check()
    run.close()
    first, last = usage[min(1, len(usage) - 1)], usage[-1]
    if last[0] > first[0] or last[1] > first[1]:
        run.violations.append(f"files and threads grew from {first[:2]} to {last[:2]}")
    growth = (last[2] - first[2]) / _MB
    if growth > 64:
        run.violations.append(f"memory grew by {growth:.0f} MB")
    return {
        "operations": operations,
        "seconds": round(time.perf_counter() - started, 1),
        "done": dict(sorted(run.counts.items())),
        "faults_on_the_way": {" ".join(name): count for name, count in sorted(run.faults.happened.items())},
        "faults_of_the_system": dict(sorted(system.happened.items())),
        "counted": dict(sorted(run.totals.items())),
        "evicted_and_counted": run.file.budget.num_evicted,
        "open_files": [first[0], last[0]],
        "threads": [first[1], last[1]],
        "memory_growth_mb": round(growth, 1),
        "violations": dict(Counter(run.violations)),
        "passed": not run.violations,
    }


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _wait_for_threads(foreign: set[threading.Thread]) -> None:
    """Threads of the tier end by themselves after their work; those of others are left alone."""
    deadline = time.monotonic() + _PATIENCE_S
    while set(threading.enumerate()) - foreign and time.monotonic() < deadline:
        time.sleep(0.005)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the store lies; by default a temporary directory")
    args = parser.parse_args()
    parent = Path(tempfile.mkdtemp(prefix="kvgraft-soak-", dir=args.dir))
    system = FaultySystem(random.Random(args.seed))
    file_module.os = system  # type: ignore[attr-defined]
    try:
        result = soak(parent / "store", args.operations, args.seed, system)
    finally:
        file_module.os = os  # type: ignore[attr-defined]
        shutil.rmtree(parent)
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
