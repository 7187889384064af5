"""Kills processes with -9 while they put donors into a directory: nothing acknowledged is lost, nothing wrong is served.

    PYTHONPATH=src python benchmarks/store_crash.py [--puts 1000] [--dir DIR]

Two processes at a time put objects, small and large, and tell of each that the store has acknowledged; one of them is killed
at a random moment, again and again. After each kill what it had acknowledged is read from a directory opened anew, at the end
everything. Prints one JSON object; exit code 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvgraft.errors import CapacityError
from kvgraft.memory.store.file import FileStore
from kvgraft.testing.stored_objects import SPACE, StoredObject, fault_of, make_object

_TOKENS = (20, 300, 5_000)
_MAX_BYTES = 4 << 30
"""More than is put, so that nothing is evicted: what is missing was lost."""
_LONGEST_WAIT_S = 0.02


@dataclass
class Writer:
    """A child process that puts objects until it is killed.

    Attributes:
        pid: Of the child.
        pipe: Acknowledged numbers come out of it, a line each.
        reported: Those read so far.
    """

    pid: int
    pipe: int
    reported: list[int] = field(default_factory=list)

    def kill(self) -> None:
        """End it now, and read what it had reported."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raw = b""
        while part := os.read(self.pipe, 1 << 16):
            raw += part
        os.close(self.pipe)
        self.reported = [int(line) for line in raw.split(b"\n")[:-1]]


def object_of(number: int) -> StoredObject:
    """The object of a number; every third is large enough that its write takes a while."""
    return make_object(number, _TOKENS[number % len(_TOKENS)])


def start_writer(root: Path, first: int) -> Writer:
    """Fork a process that puts `first`, `first` + 1 and so on."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Writer(pid, reading)
    with contextlib.suppress(BaseException):
        store = FileStore(root, max_bytes=_MAX_BYTES)
        number = first
        while True:
            wanted = object_of(number)
            with contextlib.suppress(CapacityError):
                store.put(SPACE, wanted.key, wanted.head, wanted.body)
                os.write(writing, b"%d\n" % number)
            number += 1
    os._exit(1)


def crash(root: Path, num_puts: int, dice: random.Random) -> dict[str, object]:
    """Kill until so many puts were acknowledged, and look at everything after each."""
    acknowledged: set[int] = set()
    faults: Counter[str] = Counter()
    kills = num_temporary = 0
    first, other = 0, start_writer(root, 1_000_000)
    while len(acknowledged) < num_puts:
        writer = start_writer(root, first)
        time.sleep(dice.random() * _LONGEST_WAIT_S)
        writer.kill()
        kills += 1
        num_temporary += len(list(root.glob("*/.*.tmp")))
        acknowledged.update(writer.reported)
        first = max(writer.reported, default=first - 1) + 1  # what was under way is put again by the next
        faults.update(look(root, set(writer.reported)))
        if kills % 10 == 0:
            other.kill()
            acknowledged.update(other.reported)
            faults.update(look(root, set(other.reported)))
            other = start_writer(root, max(other.reported, default=1_000_000 - 1) + 1)
    other.kill()
    acknowledged.update(other.reported)
    faults.update(look(root, acknowledged))
    store = FileStore(root, max_bytes=_MAX_BYTES)
    known = {object_of(number).key for number in acknowledged}
    return {
        "acknowledged": len(acknowledged),
        "kills": kills,
        "killed_in_the_middle_of_a_put": num_temporary,
        "published_but_not_acknowledged": len(store.keys(SPACE) - known),
        "lost": faults["lost"],
        "torn": faults["torn"],
        "wrong": faults["wrong"],
        "temporary_files_left": len(list(root.glob("*/.*.tmp"))),
        "bytes": store.used_bytes,
        "bytes_by_listing": sum(-(-path.stat().st_size // 4096) * 4096 for path in root.glob("*/*")),
        "max_bytes": _MAX_BYTES,
    }


def look(root: Path, numbers: set[int]) -> Counter[str]:
    """What is wrong with objects, as a process sees it that has just opened the directory."""
    store = FileStore(root, max_bytes=_MAX_BYTES)
    return Counter(fault_of(store, object_of(number)) for number in numbers)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--puts", type=int, default=1_000, help="puts to be acknowledged")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--dir", type=Path, help="where the store lies; by default a temporary directory")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvgraft-crash-", dir=args.dir))
    try:
        result = crash(root, args.puts, random.Random(args.seed))
    finally:
        shutil.rmtree(root)
    result["passed"] = (
        not any(result[name] for name in ("lost", "torn", "wrong", "temporary_files_left"))
        and result["bytes"] == result["bytes_by_listing"]
    )
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
