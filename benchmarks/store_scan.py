"""Times how long a catalogue of donors takes to come back from a directory, and whether it can be used meanwhile.

    PYTHONPATH=src python benchmarks/store_scan.py [--donors 1000,10000] [--dir DIR]

Donors of 500 tokens with rows of 64 bytes: heads are as long as they always are, bodies are not read. The engine's thread
takes what the feed brings between steps, here as fast as it can; each taking and each lookup is timed. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.file import FileStore
from kvgraft.memory.store.record import DonorRecord, encode_head, space_name
from kvgraft.memory.store.tier import StoreFeed
from kvgraft.reuse.stored_donors import StoredDonors
from kvgraft.types import Namespace

TOKENS = 500
_ROW_BYTES = 64
_VOCABULARY = 32_000
_SPACE = space_name("store_scan")
_NAMESPACE = Namespace("store_scan")


def tokens_of(number: int) -> np.ndarray:
    """The text of a donor."""
    return np.random.default_rng(number).integers(0, _VOCABULARY, TOKENS, dtype=np.int32)


def fill(root: Path, num_donors: int) -> None:
    """Put so many donors; nothing is synchronised with the disk, which is not what is measured."""
    store = FileStore(root, max_bytes=1 << 40)
    rows = np.zeros((TOKENS, _ROW_BYTES), np.uint8)
    with mock.patch.object(os, "fsync"):
        for number in range(num_donors):
            record = DonorRecord(_NAMESPACE.key, tokens_of(number), 0, 0)
            head = encode_head(record, _SPACE, "scan", _ROW_BYTES, page_checksums(rows, record.key))
            store.put(_SPACE, record.key, head, rows.data.cast("B"))


def scan(root: Path, num_donors: int) -> dict[str, float]:
    """Open the directory as a process does that starts, and bring its catalogue back."""
    catalogue = DonorCatalogue((num_donors + 1) * TOKENS)
    stored = StoredDonors(catalogue, min_run=32, max_generation=4)
    takes, lookups, first_s = [], [], 0.0
    started, started_cpu = time.perf_counter(), time.process_time()
    store = FileStore(root, max_bytes=1 << 40)
    opened = time.perf_counter()
    feed = StoreFeed(store, [_SPACE])
    while len(catalogue) < num_donors:
        begun = time.perf_counter()
        for record in feed.news().added:
            stored.join(record, 0)
        takes.append(time.perf_counter() - begun)
        if len(catalogue) and not first_s:
            first_s = time.perf_counter() - started
        if len(catalogue) and len(takes) % 50 == 0:
            lookups.append(_lookup(catalogue))
        time.sleep(0.0005)  # a step of the engine, which gives others the processor
    total, total_cpu = time.perf_counter() - started, time.process_time() - started_cpu
    feed.close()
    return {
        "donors": num_donors,
        "tokens_each": TOKENS,
        "open_s": round(opened - started, 4),
        "first_donor_usable_s": round(first_s, 4),
        "all_s": round(total, 3),
        "all_cpu_s": round(total_cpu, 3),
        "longest_step_ms": round(1e3 * max(takes), 2),
        "lookup_meanwhile_ms_p50": round(1e3 * float(np.median(lookups or [_lookup(catalogue)])), 3),
        "lookups_meanwhile": len(lookups),
    }


def _lookup(catalogue: DonorCatalogue) -> float:
    """Seconds to find a donor that is there, which must succeed."""
    donor = next(iter(catalogue))
    prompt = np.concatenate([tokens_of(1 << 30)[:7], donor.token_ids])
    begun = time.perf_counter()
    matches = catalogue.find(DonorQuery(_NAMESPACE, prompt))
    seconds = time.perf_counter() - begun
    if sum(match.length for match in matches) < TOKENS:
        raise SystemExit("a donor that the catalogue has was not found")
    return seconds


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--donors", default="1000,10000", help="sizes of the catalogue")
    parser.add_argument("--repeats", type=int, default=3, help="the median is reported")
    parser.add_argument("--dir", type=Path, help="where the store lies; by default a temporary directory")
    args = parser.parse_args()
    rows = []
    for size in map(int, args.donors.split(",")):
        root = Path(tempfile.mkdtemp(prefix="kvgraft-scan-", dir=args.dir))
        try:
            fill(root, size)
            runs = sorted((scan(root, size) for _ in range(args.repeats)), key=lambda run: run["all_s"])
        finally:
            shutil.rmtree(root)
        rows.append(runs[len(runs) // 2] | {"all_s_of_each_run": [run["all_s"] for run in runs]})
    print(json.dumps({"catalogue": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
