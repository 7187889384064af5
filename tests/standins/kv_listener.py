"""A listener to an engine's KV events, as a router is one; for the engines' tests."""

from __future__ import annotations

import json
import socket
import threading

import msgspec
import zmq


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Listener:
    """Collects events from the moment at which it is made; a context manager."""

    def __init__(self):
        self.port = free_port()
        self.events = []
        self._stop = threading.Event()

    @property
    def config(self):
        """What the engine is started with."""
        return json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{self.port}", "topic": ""})

    def __enter__(self):
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _listen(self):
        with zmq.Context() as context, context.socket(zmq.SUB) as heard:
            heard.connect(f"tcp://127.0.0.1:{self.port}")
            heard.setsockopt_string(zmq.SUBSCRIBE, "")
            while not self._stop.is_set():
                if heard.poll(100):
                    *_, payload = heard.recv_multipart()
                    self.events += msgspec.msgpack.decode(payload)[1]

    def stored_paths(self):
        """What a router would take to be cached: (salt, tokens from the first on) of every block that was ever stored."""
        paths = {}
        for event in self.events:
            if event["type"] != "BlockStored":
                continue
            salt, tokens = paths.get(event["parent_block_hash"], (_salt(event), ()))
            size = event["block_size"]
            for index, block_hash in enumerate(event["block_hashes"]):
                tokens += tuple(event["token_ids"][index * size : (index + 1) * size])
                paths[block_hash] = salt, tokens
        return set(paths.values())


def _salt(event):
    """SGLang names it, vLLM lists it among what else went into the hash of a first block."""
    first = (event.get("extra_keys") or [None])[0]
    return event.get("cache_salt") or (first[0] if first else None)
