"""Donors in a Mooncake Store: memory of many machines, read in ranges over TCP or RDMA. Needs the extra `mooncake`.

An object is a head and the parts of a body, under names with a prefix. Mooncake takes no deadline and does not report that a
second put was dropped, its leases may run out during a read, and it evicts what was not used for long. So calls are made on
lanes, names of parts are drawn, heads are read back, and readers verify the pages (`RowLayout`).
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections import OrderedDict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from kvgraft.config.setting import setting, without_password
from kvgraft.errors import CapacityError, ConfigError, StoreError, StoreMissError, one_line
from kvgraft.memory.store.base import KVStore
from kvgraft.memory.store.file_budget import is_name
from kvgraft.memory.store.lanes import Lane, Lanes
from kvgraft.memory.store.options import read_options
from kvgraft.memory.store.parts import PARTS_BYTES, Parts, require_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_GROUP = "Mooncake store"
_LANES = 3
"""Two for a reader's threads, one for a writer's."""
_BATCH = 16
"""Heads that are read at once, each into its share of a lane's buffer."""
_MOST_KNOWN = 1 << 14
_FULL = -200
_GONE = (-703, -704, -710, -712)
"""Not ready, not found, and no replica: an object that is not there for us."""
_OUT_OF_RANGE = -600
_LATE = -707
"""The lease ran out during a read, which may have seen other bytes: it is read again once."""
_LEFT_OPEN: list[Any] = []
"""Clients in which calls hang."""
_WAITS_S = (0.05, 0.1, 0.2)
"""A full pool evicts in the background when a put has failed: it is tried again after these."""


@dataclass(frozen=True)
class MooncakeOptions:
    """Options after the question mark of `mooncake://MASTER_HOST:PORT?`."""

    protocol: str = setting("tcp", "how bytes travel", _GROUP, choices=("tcp", "rdma"))
    devices: str = setting("", "RDMA devices, joined by semicolons", _GROUP, may_be_empty=True)
    local: str = setting("", "name or address of this machine for the others", _GROUP, may_be_empty=True)
    metadata: str = setting("P2PHANDSHAKE", "metadata server, or P2PHANDSHAKE for none", _GROUP)
    segment_bytes: int = setting(
        0,
        "memory of this process that is lent to the store, and goes with the process",
        _GROUP,
        low=16 << 20,
        or_zero=True,
        size=True,
    )
    buffer_bytes: int = setting(
        192 << 20, "registered memory for transfers; a third of it is the longest value", _GROUP, low=3 << 20, size=True
    )
    admin_port: int = setting(9003, "port of the master's HTTP service, which lists keys", _GROUP, low=1, high=65535)
    timeout_s: float = setting(5.0, "how long a call may take before it fails", _GROUP, above=0)
    prefix: str = setting("kvgraft", "prefix of all keys", _GROUP)


def open_mooncake_store(where: str, options: Mapping[str, str]) -> MooncakeStore:
    """Open the store of `mooncake://MASTER_HOST:PORT?OPTION=VALUE&...`. The master may come later.

    Raises:
        ConfigError: The URL cannot be read.
        ImportError: Mooncake, or a system library that it needs, is not installed.
    """
    chosen = read_options("mooncake", MooncakeOptions, options)
    try:
        url = urlsplit(f"mooncake:{where}")
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if not host or not port or url.path.strip("/") or url.username:
        shown = without_password(f"mooncake:{where}")
        raise ConfigError(f"the master of store {shown!r} cannot be read; write mooncake://HOST:PORT")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ImportError(
            f"store 'mooncake' needs Mooncake ({one_line(error)}): pip install 'kvgraft[mooncake]', and from the system "
            "libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 liburing2",
            name="mooncake",
        ) from error
    store = MooncakeStore(MooncakeDistributedStore, host, port, chosen)
    try:
        store.reach()
    except StoreError as error:
        logger.warning("%s; it is tried again when it is needed", error)
    return store


class MooncakeStore(KVStore):
    """Objects in a Mooncake Store. Thread-safe."""

    name = "mooncake"

    def __init__(self, client: Callable[[], Any], host: str, port: int, options: MooncakeOptions) -> None:
        """Prepare; the master is asked when something is wanted of it.

        Args:
            client: Makes a `MooncakeDistributedStore`.
            host: Of the master.
            port: Of the master.
            options: See there.
        """
        self._make_client = client
        self._host, self._port = host, port
        self._options = options
        self._timeout_s = options.timeout_s
        self._part_bytes = options.buffer_bytes // _LANES
        self._client: Any = None
        self._connecting = threading.Lock()
        self._lanes = Lanes("kvgraft-mooncake", _LANES, self._part_bytes)
        self._known: OrderedDict[tuple[str, str], Parts] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MooncakeStore({self._host}:{self._port})"

    def reach(self) -> None:
        """Connect, and lend memory if that was asked for.

        Raises:
            StoreError: The master does not answer.
        """
        with self._lanes.one(self._timeout_s) as lane:
            self._call(lane, lambda _: None)

    def put(self, space: str, key: str, head: bytes, body: memoryview) -> bool:
        """See `KVStore`. The body is copied into registered memory part by part."""
        head_name = self._head(space, key)
        parts = Parts.draw(self._part_bytes, len(body))
        names = parts.names(self._body_prefix(space, key))
        with self._lanes.one(self._timeout_s) as lane:
            if self._call(lane, lambda client: self._flag(client.is_exist(head_name))):
                return False
            self._require_room(len(head) + len(body))
            try:
                for number, name in enumerate(names):
                    start = number * self._part_bytes
                    self._put_value(lane, name, body[start : start + self._part_bytes])
                self._put_value(lane, head_name, memoryview(parts.pack() + head))
                there = self._parts_in_a_while(lane, space, key)
                is_mine = there == parts
                flags = self._call(lane, lambda client: client.batch_is_exist(names)) if names else []
            except BaseException:
                self._drop_quietly(lane, names)
                raise
            if is_mine and all(flag == 1 for flag in flags):
                return True
            self._drop_quietly(lane, [head_name, *names] if is_mine else names)
        if there is None:
            raise StoreError(
                f"{self!r} keeps the name of {key} for a writer that has not finished; it is free again later"
            )
        if is_mine:
            raise CapacityError(f"{self!r} evicted {key} while it was written; lend it more memory")
        return False

    def keys(self, space: str) -> frozenset[str]:
        """See `KVStore`. Complexity: all keys of the store, over HTTP."""
        prefix = self._heads(space)
        names = self._admin("/get_all_keys").decode("utf-8", "replace").splitlines()
        found = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return frozenset(name for name in found if is_name(name))

    def heads(self, space: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `KVStore`. Complexity: a call per 16 heads."""
        for start in range(0, len(keys), _BATCH):
            yield from self._some_heads(space, keys[start : start + _BATCH])

    def read(self, space: str, key: str, offset: int, into: memoryview) -> None:
        """See `KVStore`. One call per part and buffer, into registered memory and from there into `into`."""
        with self._lanes.one(self._timeout_s) as lane:
            parts = self._known.get((space, key)) or self._parts_there(lane, space, key)
            for _ in range(2):
                if parts is None:
                    break
                if offset + len(into) > parts.num_bytes:
                    raise StoreMissError(f"{key} in {self!r} has {parts.num_bytes} bytes, not {offset + len(into)}")
                if self._fill(lane, parts.names(self._body_prefix(space, key)), parts, offset, into):
                    return
                now = self._parts_there(lane, space, key)
                if now == parts:  # a head without its body
                    self._drop_quietly(lane, [self._head(space, key), *parts.names(self._body_prefix(space, key))])
                    now = None
                self._remember(space, key, now)
                parts = now
        raise StoreMissError(f"{self!r} has no {key} any more")

    def remove(self, space: str, key: str) -> None:
        """See `KVStore`. Readers that are at it notice by their checksums."""
        with self._lanes.one(self._timeout_s) as lane:
            parts = self._parts_there(lane, space, key)
            names = [self._head(space, key), *(parts.names(self._body_prefix(space, key)) if parts else [])]
            self._remember(space, key, None)
            codes = self._call(lane, lambda client: client.batch_remove(names, True))
            for code in codes:
                if code not in (0, *_GONE):
                    raise self._error(code)

    def touch(self, space: str, keys: Iterable[str]) -> None:
        """See `KVStore`. Mooncake evicts last what was asked for last."""
        names: list[str] = []
        for key in keys:
            names.append(self._head(space, key))
            parts = self._known.get((space, key))
            names += parts.names(self._body_prefix(space, key)) if parts else []
        if names:
            with self._lanes.one(self._timeout_s) as lane:
                self._call(lane, lambda client: client.batch_is_exist(names))

    def close(self) -> None:
        """See `KVStore`. Memory that this process lends goes, with what lies there.

        Not while a call is under way that came too late for its caller: Mooncake's client crashes the process if it is
        closed then. It is left as it is if such a call does not come back.
        """
        client, self._client = self._client, None
        if client is not None:
            until = time.monotonic() + self._timeout_s
            try:
                with ExitStack() as all_lanes:
                    for _ in self._lanes.all:
                        lane = all_lanes.enter_context(self._lanes.one(max(0.0, until - time.monotonic())))
                    lane.call(client.close, self._timeout_s)
            except StoreError as error:
                _LEFT_OPEN.append(client)
                logger.warning("%r was left open: %s", self, error)
        self._lanes.close()

    def _some_heads(self, space: str, keys: Sequence[str]) -> list[tuple[str, bytes | None]]:
        share = self._part_bytes // _BATCH
        names = [self._head(space, key) for key in keys]
        with self._lanes.one(self._timeout_s) as lane:
            places = [lane.buffer.ctypes.data + number * share for number in range(len(names))]
            sizes = [share] * len(names)
            lengths = self._call(lane, lambda client: client.batch_get_into(names, places, sizes))
            found = [self._taken(lane.buffer[n * share :], length) for n, length in enumerate(lengths)]
            for number, name in enumerate(names):
                if lengths[number] == _OUT_OF_RANGE:
                    found[number] = self._long_head(lane, name)
        heads: list[tuple[str, bytes | None]] = []
        for key, raw in zip(keys, found, strict=True):
            parts = None if raw is None else Parts.unpack(raw)
            self._remember(space, key, parts)
            heads.append((key, raw if raw is None or parts is None else raw[PARTS_BYTES:]))
        return heads

    def _taken(self, buffer: Any, length: int) -> bytes | None:  # noqa: ANN401
        """A head out of a buffer, by the code that came with it."""
        if length in (*_GONE, _OUT_OF_RANGE):
            return None
        if length < 0:
            raise self._error(length)
        return bytes(buffer[:length])

    def _long_head(self, lane: Lane, name: str) -> bytes | None:
        """A head that is longer than its share of the buffer; one longer than the whole buffer is none, and empty."""
        place, size = lane.buffer.ctypes.data, len(lane.buffer)
        length = self._call(lane, lambda client: client.get_into(name, place, size))
        return b"" if length == _OUT_OF_RANGE else self._taken(lane.buffer, length)

    def _fill(self, lane: Lane, names: list[str], parts: Parts, offset: int, into: memoryview) -> bool:
        """Read part by part; False if one is gone."""
        place = lane.buffer.ctypes.data
        for span in parts.spans(offset, len(into), self._part_bytes):
            name, start, length = names[span.part], span.start, span.stop - span.start
            code = self._call(lane, lambda client: _range(client, place, name, start, length))  # noqa: B023 - called here
            if code in (*_GONE, _OUT_OF_RANGE):  # or shorter than the head says
                return False
            if code != length:
                raise self._error(code)
            into[span.into : span.into + length] = lane.buffer.data[:length]
        return True

    def _parts_there(self, lane: Lane, space: str, key: str) -> Parts | None:
        """Where the body lies by what the head says; None if there is none that says it."""
        place, name = lane.buffer.ctypes.data, self._head(space, key)
        code = self._call(lane, lambda client: _range(client, place, name, 0, PARTS_BYTES))
        if code in (*_GONE, _OUT_OF_RANGE):
            return None
        if code != PARTS_BYTES:
            raise self._error(code)
        return Parts.unpack(bytes(lane.buffer[:PARTS_BYTES]))

    def _parts_in_a_while(self, lane: Lane, space: str, key: str) -> Parts | None:
        """Where a body lies whose head was just written; None if a put of before holds its name and does not end."""
        for wait_s in (*_WAITS_S, 0.0):
            if (there := self._parts_there(lane, space, key)) is not None:
                return there
            time.sleep(wait_s)
        return None

    def _put_value(self, lane: Lane, name: str, value: memoryview) -> None:
        """Write a value that fits into a lane's buffer; a full store has a little while to make room."""
        length, place = len(value), lane.buffer.ctypes.data
        if length > len(lane.buffer):
            raise CapacityError(f"a head of {length} bytes does not fit into buffer_bytes of {self!r}")
        lane.buffer[:length] = np.frombuffer(value, np.uint8)
        for wait_s in (*_WAITS_S, None):
            code = self._call(lane, lambda client: client.put_from(name, place, length))
            if code != _FULL:
                break
            if wait_s is None:
                raise CapacityError(
                    f"{self!r} is full, or no client lends it memory; start mooncake_client, or add segment_bytes=4GiB"
                )
            time.sleep(wait_s)
        if code:
            raise self._error(code)

    def _require_room(self, num_bytes: int) -> None:
        """Refuse what is longer than all memory that is lent: trying would drive others out."""
        try:
            found = json.loads(self._admin("/get_segments_detail"))
            total = sum(int(segment["allocator_capacity_bytes"]) for segment in found["segments"])
        except (StoreError, ValueError, KeyError, TypeError):
            return
        if 0 < total < num_bytes:  # 0: none is known yet
            raise CapacityError(f"{num_bytes} bytes do not fit into {self!r}, which was lent {total}")

    def _drop_quietly(self, lane: Lane, names: list[str]) -> None:
        if names:
            with suppress(StoreError):  # they are evicted once unused
                self._call(lane, lambda client: client.batch_remove(names, True))

    def _call(self, lane: Lane, do: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        """Ask Mooncake, which is connected if it was not."""
        try:
            if self._client is None:
                lane.call(self._connect, self._timeout_s)
            client = self._client
            return lane.call(lambda: do(client), self._timeout_s)
        except StoreError as error:
            raise StoreError(f"{self!r} cannot be asked: {error}") from error
        except Exception as error:
            raise StoreError(f"{self!r} failed: {one_line(error)}") from error

    def _connect(self) -> None:
        if not self._connecting.acquire(blocking=False):
            raise StoreError("its master has not answered yet")
        try:
            if self._client is not None:
                return
            with socket.create_connection((self._host, self._port), self._timeout_s) as probe:
                local = self._options.local or probe.getsockname()[0]
            client, chosen = self._make_client(), self._options
            master = f"{self._host}:{self._port}"
            code = client.setup(
                local, chosen.metadata, chosen.segment_bytes, 1 << 20, chosen.protocol, chosen.devices, master
            )
            for lane in self._lanes.all:
                code = code or client.register_buffer(lane.buffer.ctypes.data, len(lane.buffer))
            if code:
                raise StoreError(f"it cannot be set up (code {code}); look at what Mooncake has logged")
            self._client = client
        except OSError as error:
            raise StoreError(str(error) if isinstance(error, StoreError) else one_line(error)) from error
        finally:
            self._connecting.release()

    def _admin(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._options.admin_port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise StoreError(f"the HTTP service of {self!r} answers {answer.status} to {path}")
            return answer.read()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"the HTTP service of {self!r} on port {self._options.admin_port} cannot be asked ({one_line(error)}); "
                "admin_port must be the master's metrics_port"
            ) from error
        finally:
            connection.close()

    def _flag(self, code: int) -> bool:
        if code not in (0, 1):
            raise self._error(code)
        return code == 1

    def _error(self, code: int) -> StoreError:
        if code in _GONE:
            return StoreMissError(f"{self!r} has it no more (code {code})")
        return StoreError(f"{self!r} failed (Mooncake's code {code})")

    def _remember(self, space: str, key: str, parts: Parts | None) -> None:
        with self._lock:
            self._known.pop((space, key), None)
            if parts is not None:
                self._known[space, key] = parts
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _head(self, space: str, key: str) -> str:
        return self._heads(space) + require_name(key)

    def _heads(self, space: str) -> str:
        return f"{self._options.prefix}:h:{require_name(space)}:"

    def _body_prefix(self, space: str, key: str) -> str:
        return f"{self._options.prefix}:b:{require_name(space)}:{require_name(key)}"


def _range(client: Any, place: int, name: str, start: int, length: int) -> int:  # noqa: ANN401
    """Read one range of one object to an address in registered memory; the number of bytes, or a code."""
    if not length:
        return 0
    code = _LATE
    for _ in range(2):
        if code == _LATE:
            (((code,),),) = client.get_into_ranges([place], [[name]], [[[0]]], [[[start]]], [[[length]]])
    return int(code)
