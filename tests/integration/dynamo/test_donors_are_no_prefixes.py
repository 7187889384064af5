"""Dynamo's own indexer on our events: exact pages count, donors count for nothing, and harm nothing around them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.events import EventLog, PublisherConfig, ZmqEventPublisher
from kvgraft.prefix import RadixCache, RadixKey
from kvgraft.reuse.donor_events import donor_removed, donor_stored
from kvgraft.types import Namespace

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("KVGRAFT_DYNAMO_PYTHON", ROOT / ".venv-dynamo" / "bin" / "python"))
SCRIPT = ROOT / "benchmarks" / "engines" / "dynamo_selection.py"
WAIT_S = 60.0

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-dynamo with ai-dynamo-runtime"),
]


class Service:
    """The selection service in a process of its own."""

    def __init__(self, endpoint):
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"DYN_LOG": "off"}
        command = [str(PYTHON), str(SCRIPT), endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        assert self._line() == {"ready": True}

    def blocks(self, token_ids):
        self.process.stdin.write(json.dumps({"token_ids": [int(t) for t in token_ids]}) + "\n")
        self.process.stdin.flush()
        return self._line()["blocks"][0]

    def _line(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()


@pytest.fixture
def served():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    publisher = ZmqEventPublisher(PublisherConfig(f"tcp://*:{port}"))
    service = Service(f"tcp://127.0.0.1:{port}")
    yield publisher, service
    service.close()
    publisher.close()


@pytest.mark.parametrize("generation", [0, 2])
def test_donors_are_no_prefixes(served, generation):
    publisher, service = served
    text, shifted = np.arange(64), np.arange(1000, 1064)
    log = EventLog()
    cache = RadixCache(16, events=log)
    donor = DonorCatalogue(1_000).add(Namespace("model", "", "salt"), shifted, None, generation=generation).donor
    number, give_up = 0, time.monotonic() + WAIT_S
    while service.blocks([*text, 1]) < 4:  # until the subscription is in effect
        assert time.monotonic() < give_up, "the exact pages are never known"
        cache.reset()
        log.take()
        cache.insert(RadixKey(tuple(text)), np.arange(64))
        log.announce(donor_stored(donor))
        number += 100
        cache.insert(RadixKey(tuple(text + 5000 + number)), np.arange(64, 128))
        publisher.publish(log.take())
        time.sleep(0.05)
    assert service.blocks([*(text + 5000 + number), 1]) == 4, "what stands behind a donor in a batch is read"
    assert service.blocks([*shifted, 1]) == 0
    assert service.blocks([*range(7), *shifted, 1]) == 0
    publisher.publish([donor_removed(donor)])
    cache.insert(RadixKey(tuple(text + 90_000)), np.arange(128, 192))
    publisher.publish(log.take())
    while service.blocks([*(text + 90_000), 1]) < 4:
        assert time.monotonic() < give_up, "what follows the removal of a donor is read"
    assert service.blocks([*text, 1]) == 4
