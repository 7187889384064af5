"""Redis and Mooncake against the suite of all stores, on real servers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.store_servers import MooncakeMaster, RedisServer, need_mooncake, need_redis

from kvgraft.memory.store import open_store
from kvgraft.memory.store.parts import PARTS_BYTES, Parts
from kvgraft.testing.store_suite import KVStoreTests
from kvgraft.testing.stored_objects import SPACE


class RedisTests(KVStoreTests):
    policy = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory):
        need_redis()
        with RedisServer(tmp_path_factory.mktemp("redis"), "--maxmemory-policy", cls.policy) as cls.running:
            yield

    def make_store(self, max_bytes):
        with self.running.client() as client:
            client.flushall()
            own = client.info("memory")["used_memory"]
            client.config_set("maxmemory", own + int(0.8 * max_bytes))
        return open_store(self.url(max_bytes))

    def url(self, max_bytes):
        del max_bytes
        return self.running.url(value_bytes="5000000")

    def damage(self, store, key, kind):
        with self.running.client() as client:
            head, (body,) = f"kvgraft:h:{SPACE}:{key}", client.keys(f"kvgraft:b:{SPACE}:{key}:*")
            if kind in ("head", "body"):
                name, place = (head, PARTS_BYTES + 900) if kind == "head" else (body, 9_000)
                (old,) = client.getrange(name, place, place)
                client.setrange(name, place, bytes([old ^ 4]))
            elif kind == "truncated":
                client.set(body, client.getrange(body, 0, -2))
            else:
                client.set(head, {"empty": b"", "foreign": b"GIF89a" * 1_000}[kind])
        return True


class TestFullRedisRefuses(RedisTests):
    policy = "noeviction"


class TestFullRedisEvicts(RedisTests):
    policy = "allkeys-lru"
    full_bytes = 16 << 20  # requests and replies under way count as well
    keeps_used = False  # Redis evicts the oldest of a few that it draws, and counts ages in seconds


class TestMooncakeStore(KVStoreTests):
    keeps_used = False  # what was asked for is safe for a while, then the oldest lease goes
    full_bytes = 16 << 20

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def pool(cls, tmp_path_factory):
        """One master and one client for most tests: each client takes two seconds to end, and keeps memory until then."""
        need_mooncake()
        with MooncakeMaster(tmp_path_factory.mktemp("mooncake"), "--default_kv_lease_ttl=500") as cls.shared:
            cls.lender = None
            yield
            cls.close_lender()

    @classmethod
    def close_lender(cls):
        if cls.lender is not None:
            cls.lender.close()
        cls.lender = None

    @pytest.fixture(autouse=True)
    def master(self):
        self.running = self.shared
        self.own = contextlib.ExitStack()
        with self.own:
            yield

    @pytest.fixture
    def store(self):
        cls = type(self)
        if cls.lender is None:
            cls.lender = open_store(self.shared.url(segment_bytes="64MiB", buffer_bytes="24MiB"))
        cls.lender._client.remove_all(True)
        return cls.lender

    def make_store(self, max_bytes):
        """One with a master of its own, since what is lent to a pool is its limit; no other client is open."""
        self.close_lender()
        folder = Path(self.own.enter_context(TemporaryDirectory()))
        self.running = self.own.enter_context(MooncakeMaster(folder, "--default_kv_lease_ttl=500"))
        return open_store(self.running.url(segment_bytes=max_bytes, buffer_bytes="24MiB"))

    def url(self, max_bytes):
        del max_bytes
        return self.running.url(buffer_bytes="24MiB")

    def _child(self, first, count):
        """As the suite's, without what Mooncake writes to stderr at every start."""
        command = [sys.executable, "-m", "kvgraft.testing.stored_objects", self.url(0), str(first), str(count)]
        quiet = ["sh", "-c", 'exec "$0" "$@" 2>/dev/null', *command]
        return subprocess.Popen(quiet, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def damage(self, store, key, kind):
        head = f"kvgraft:h:{SPACE}:{key}"
        raw = store._client.get(head)
        parts = Parts.unpack(raw)
        (body,) = parts.names(f"kvgraft:b:{SPACE}:{key}")
        if kind in ("body", "truncated"):
            value = bytearray(store._client.get(body))
            value[9_000] ^= 4
            self._replace(store, body, bytes(value if kind == "body" else value[:-1]))
        else:
            damaged = raw[:900] + bytes([raw[900] ^ 4]) + raw[901:]
            self._replace(store, head, {"head": damaged, "empty": b"\0", "foreign": b"GIF89a" * 1_000}[kind])
        return True

    def _replace(self, store, name, value):
        assert store._client.remove(name, True) == 0
        assert store._client.put(name, value) == 0
