"""Times spans of a stored donor through the tier, verified, against the medium's own read of the same bytes.

    PYTHONPATH=src python benchmarks/store_bandwidth.py [--stores file] [--spans 300,...] [--model DIR] [--dir DIR]

A donor of 8,192 tokens is put into each store, with rows as long as SmolLM2's and graft-tiny's. Spans begin anywhere, so that
the tier reads up to two pages of 256 tokens more than it gives. Rounds alternate; medians of wall clock and processor time
are told, in ms:

    tier    StoreReader.fetch until the K/V are there: rounded out to pages, every checksum verified
    plain   the medium's own client reading the same pages into fresh memory, nothing verified
    span    the same for the tokens of the span alone

`cold` is the first read behind the page cache, where a medium has one. With `--model` the prefill of that model is timed, and
the break-even length of the first rows told: the shortest span whose read takes less time than its computation.

A store of your own takes a line in `MEDIA`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvgraft.memory.store.file import FileStore
from kvgraft.memory.store.layout import Field, RowLayout
from kvgraft.memory.store.record import PAGE_TOKENS
from kvgraft.memory.store.tier import StoreReader
from kvgraft.testing.stored_objects import SPACE, StoredObject, make_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.memory.store import KVStore

DONOR_TOKENS = 8_192
SPANS = (300, 512, 1_024, 2_048, 4_096, 8_000)
ROWS = {
    "SmolLM2-135M float32": RowLayout((Field(3, 64, torch.float32),) * 60),
    "graft-tiny float32": RowLayout((Field(4, 32, torch.float32),) * 12),
}
_PATIENCE_S = 120.0
_M_MMAP_THRESHOLD = -3
"""From malloc.h."""
_PREFILL_TOKENS = 1_024


class Medium(ABC):
    """A store, and its own client without ours around it.

    Attributes:
        store: Ours.
    """

    store: KVStore

    @abstractmethod
    def plain(self, wanted: StoredObject, offset: int, into: memoryview) -> None:
        """Fill `into` with the body's bytes from `offset` on, as somebody would who knew nothing of kvgraft."""

    def forget(self, wanted: StoredObject) -> bool:
        """Drop an object from caches in front of the medium; False if there are none."""
        del wanted
        return False

    @abstractmethod
    def close(self) -> None:
        """Remove everything."""


class FileMedium(Medium):
    """`preadv` of a file."""

    def __init__(self, folder: Path | None) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="kvgraft-bandwidth-", dir=folder))
        self.store: FileStore = FileStore(self._root)

    def plain(self, wanted: StoredObject, offset: int, into: memoryview) -> None:
        """See `Medium`."""
        descriptor = os.open(self.store.path(SPACE, wanted.key), os.O_RDONLY)
        try:
            count = os.preadv(descriptor, [into], len(wanted.head) + offset)
        finally:
            os.close(descriptor)
        if count != len(into):
            raise SystemExit(f"{count} bytes were read, not {len(into)}")

    def forget(self, wanted: StoredObject) -> bool:
        """See `Medium`."""
        descriptor = os.open(self.store.path(SPACE, wanted.key), os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        return True

    def close(self) -> None:
        """See `Medium`."""
        shutil.rmtree(self._root)


MEDIA: dict[str, Callable[[Path | None], Medium]] = {"file": FileMedium}


def measure(medium: Medium, rows: str, spans: list[int], repeats: int, dice: random.Random) -> dict[str, object]:
    """Put a donor and read it in all ways."""
    layout = ROWS[rows]
    wanted = make_object(1, DONOR_TOKENS, layout=layout)
    begun = time.perf_counter()
    medium.store.put(SPACE, wanted.key, wanted.head, wanted.body)
    put_s = time.perf_counter() - begun
    reader = StoreReader(medium.store, SPACE, layout, max_pending_bytes=1 << 40)
    lines = [measure_span(medium, reader, wanted, span, repeats=repeats, dice=dice) for span in spans]
    result: dict[str, object] = {
        "rows": rows,
        "bytes_per_token": layout.bytes_per_token,
        "put_ms": round(1e3 * put_s, 1),
        "spans": lines,
    }
    if medium.forget(wanted):
        result["cold"] = [
            measure_cold(medium, reader, wanted, span, repeats=max(repeats // 4, 1), dice=dice) for span in spans
        ]
        for span in spans:  # the speed that the reader tells is that of the warm cache again
            for _ in range(4):
                fetch(reader, wanted, dice.randrange(DONOR_TOKENS - span + 1), span)
    result["expected_ms"] = {length: round(1e3 * reader.expected_s(length), 2) for length in spans}
    result["reader"] = reader
    medium.store.remove(SPACE, wanted.key)
    return result


def measure_span(
    medium: Medium, reader: StoreReader, wanted: StoredObject, span: int, *, repeats: int, dice: random.Random
) -> dict[str, object]:
    """Medians over spans of one length; the first round warms up."""
    times: dict[str, list[Seconds]] = {"tier": [], "plain": [], "span": []}
    for _ in range(repeats + 1):
        start = dice.randrange(DONOR_TOKENS - span + 1)
        for name in dice.sample(sorted(times), 3):
            if name == "tier":
                times[name].append(fetch(reader, wanted, start, span))
            else:
                part = pages(start, span) if name == "plain" else (start, start + span)
                times[name].append(read_plain(medium, wanted, *part))
    return {"tokens": span, **medians({name: seconds[1:] for name, seconds in times.items()})}


def measure_cold(
    medium: Medium, reader: StoreReader, wanted: StoredObject, span: int, *, repeats: int, dice: random.Random
) -> dict[str, object]:
    """Medians of first reads."""
    times: dict[str, list[Seconds]] = {"tier": [], "plain": []}
    for _ in range(repeats):
        start = dice.randrange(DONOR_TOKENS - span + 1)
        for name in dice.sample(sorted(times), 2):
            medium.forget(wanted)
            is_tier = name == "tier"
            seconds = fetch(reader, wanted, start, span) if is_tier else read_plain(medium, wanted, *pages(start, span))
            times[name].append(seconds)
    return {"tokens": span, **medians(times)}


def medians(times: dict[str, list[Seconds]]) -> dict[str, float]:
    """Of wall clock and processor time, and how many times as much as the others the tier takes."""
    found: dict[str, float] = {}
    for clock in Seconds._fields:
        value = {name: float(np.median([getattr(one, clock) for one in runs])) for name, runs in times.items()}
        found |= {f"{name}_{clock}_ms": round(1e3 * seconds, 3) for name, seconds in value.items()}
        for name in sorted(times.keys() - {"tier"}):
            found[f"tier_over_{name}_{clock}"] = round(value["tier"] / value[name], 2)
    return found


def pages(start: int, span: int) -> tuple[int, int]:
    """First and last token of the pages around a span."""
    return start // PAGE_TOKENS * PAGE_TOKENS, min(-(-(start + span) // PAGE_TOKENS) * PAGE_TOKENS, DONOR_TOKENS)


class Seconds(NamedTuple):
    """What a read took.

    Attributes:
        wall: On the clock.
        cpu: Of the processor, in all threads; other processes do not disturb it.
    """

    wall: float
    cpu: float


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Seconds:
        """Time since."""
        return Seconds(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def fetch(reader: StoreReader, wanted: StoredObject, start: int, span: int) -> Seconds:
    """Time of a read through the tier, which must be right."""
    watch = Stopwatch()
    arriving = reader.fetch(wanted.key, start, span)
    arriving.wait(_PATIENCE_S)
    seconds = watch.read()
    first = arriving.block().keys[0][0].contiguous().view(torch.uint8).flatten().numpy()
    if not np.array_equal(first, wanted.rows[start, : len(first)]):
        raise SystemExit("the tier gave wrong bytes")
    return seconds


def read_plain(medium: Medium, wanted: StoredObject, start: int, stop: int) -> Seconds:
    """Time of the medium's own read into fresh memory."""
    row = wanted.rows.shape[1]
    watch = Stopwatch()
    rows = np.empty((stop - start, row), np.uint8)
    medium.plain(wanted, start * row, rows.data.cast("B"))
    seconds = watch.read()
    if not np.array_equal(rows[0], wanted.rows[start]):
        raise SystemExit("the medium gave wrong bytes")
    return seconds


def prefill_tokens_per_s(model: str) -> float:
    """Speed of the embedded engine on text that it has never seen; the median of two behind a first."""
    from kvgraft.engine import LLM, SamplingParams

    llm = LLM(model, dtype="float32", num_slots=4 * _PREFILL_TOKENS)
    rng, seconds = np.random.default_rng(0), []
    for _ in range(3):
        prompt = rng.integers(100, 4_000, _PREFILL_TOKENS)
        begun = time.perf_counter()
        llm.generate(prompt, SamplingParams(1))
        seconds.append(time.perf_counter() - begun)
    return _PREFILL_TOKENS / float(np.median(seconds[1:]))


def break_even(reader: StoreReader, tokens_per_s: float) -> int | None:
    """The shortest span that is read sooner than it is computed; None if none of up to 8K tokens is."""
    return next((n for n in range(1, DONOR_TOKENS + 1) if reader.expected_s(n) < n / tokens_per_s), None)


def never_reuse_memory() -> None:
    """Have the C library give every buffer new pages, to all that are compared: K/V that were read are kept for a while."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 18)


def main() -> int:
    """Run and print."""
    never_reuse_memory()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", default="file", help=f"of {', '.join(MEDIA)}")
    parser.add_argument("--rows", default=",".join(ROWS), help="layouts, joined by commas")
    parser.add_argument("--spans", default=",".join(map(str, SPANS)), help="tokens, joined by commas")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--model", help="directory of the model whose prefill the read competes with")
    parser.add_argument("--dir", type=Path, help="where files lie; by default a temporary directory")
    args = parser.parse_args()
    spans, dice, stores = [int(span) for span in args.spans.split(",")], random.Random(0), {}
    readers: dict[str, StoreReader] = {}
    for name in args.stores.split(","):
        stores[name] = []
        for rows in args.rows.split(","):
            medium = MEDIA[name](args.dir)
            try:
                line = measure(medium, rows, spans, args.repeats, dice)
            finally:
                medium.close()
            reader = line.pop("reader")
            readers.setdefault(name, reader)
            reader.close()
            stores[name].append(line)
    result: dict[str, object] = {"donor_tokens": DONOR_TOKENS, "stores": stores}
    if args.model:
        tokens_per_s = prefill_tokens_per_s(args.model)  # last: threads of a model that wait take processor time
        result["prefill_tokens_per_s"] = round(tokens_per_s, 1)
        result["break_even_tokens"] = {name: break_even(reader, tokens_per_s) for name, reader in readers.items()}
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
