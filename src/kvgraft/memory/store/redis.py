"""Donors on a Redis or Valkey server. Needs the extra `redis`.

Keys, after a prefix: `h:SPACE:KEY` is a head, `b:SPACE:KEY:DRAWN:NUMBER` a part of a body, `i:SPACE` the index of a space (a
sorted set by the time of expiry), `v:SPACE` a token that is there as long as the index has not changed. Parts are written
first, with a time to live of their own in case the writer dies; head and index follow in one transaction. The server may
evict or expire any of them: a head without its body, or an index with names of what is gone, is repaired by the process
that notices.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvgraft.errors import CapacityError, StoreError, StoreMissError, one_line
from kvgraft.memory.store.base import KVStore
from kvgraft.memory.store.file_budget import is_name
from kvgraft.memory.store.parts import PARTS_BYTES, Parts, require_name
from kvgraft.memory.store.record import LONGEST_HEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)

_BATCH = 64
"""Heads that are asked for at once."""
_FIRST_BYTES = 1 << 14
"""Of each of these; longer heads are asked for one by one, and none beyond what a head may have."""
_PIECE_BYTES = 1 << 20
"""A span is asked for in pieces of this length, all at once: a reply that does not fit into the client's buffer costs more
copies (benchmarks/store_remote.py)."""
_ROUND_BYTES = 8 << 20
"""Asked for at once: unread replies count as the server's memory, and a full server evicts for them."""
_STAGING_S = 600
"""Lifetime in seconds of parts of a put after its writer died."""
_INDEX_SPARE_S = 3600
"""How much longer than its objects an index lives."""
_CHECKED = 256
"""Names that are looked for at each listing, in turn: what was evicted is found by that."""
_MOST_KNOWN = 1 << 14
"""Objects of which it is kept where their parts lie."""
_WRONG_TYPE = "WRONGTYPE"
"""The server's error for a value of another type than was asked for."""
_WHOLE = "*"
"""An index that has this name lists all that there is; another one was evicted and begun anew."""

# Forgets heads that still begin as they did when they were found dead, so that one put meanwhile stays. A value that is no
# text begins with nothing.
# KEYS: index, token, heads; ARGV: beginning and name of each.
_FORGET = """
local forgotten = 0
for i = 3, #KEYS do
  local beginning, name = ARGV[2 * i - 5], ARGV[2 * i - 4]
  local found = ''
  if redis.call('TYPE', KEYS[i])['ok'] == 'string' then
    found = redis.call('GETRANGE', KEYS[i], 0, math.max(#beginning, 1) - 1)
  end
  if found == beginning then
    redis.call('UNLINK', KEYS[i])
    forgotten = forgotten + redis.call('ZREM', KEYS[1], name)
  end
end
if forgotten > 0 then redis.call('DEL', KEYS[2]) end
return forgotten
"""


class RedisStore(KVStore):
    """Objects on one server. Thread-safe.

    A server that is dead or hangs costs a call at most the timeout of the client's sockets; it may drop what it wants.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401
        *,
        name: str,
        where: str,
        ttl_s: int,
        part_bytes: int,
        prefix: str,
    ) -> None:
        """Use a client of redis-py that gives bytes.

        Args:
            client: Its own from now on.
            name: See `KVStore`.
            where: Host, port and number of the database, for messages.
            ttl_s: How long an object lives that is not touched; 0 is for ever.
            part_bytes: Longest value of a body.
            prefix: Beginning of all keys.
        """
        import redis

        self.name = name
        self._client = client
        self._redis = redis
        self._where = where
        self._ttl_s = ttl_s
        self._part_bytes = part_bytes
        self._prefix = prefix
        self._known: OrderedDict[tuple[str, str], Parts] = OrderedDict()
        self._listings: dict[str, _Listing] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RedisStore({self._where})"

    def ping(self) -> None:
        """Ask for a sign of life.

        Raises:
            StoreError: There is none, or the server does not let us in.
        """
        with self._errors("reached"):
            self._client.ping()

    def put(self, space: str, key: str, head: bytes, body: memoryview) -> bool:
        """See `KVStore`. A body of several parts is written one by one."""
        parts = Parts.draw(self._part_bytes, len(body))
        names = parts.names(self._body_prefix(space, key))
        with self._errors("written to"):
            if self._client.exists(self._head(space, key)):
                self._index_again(space, key)
                return False
            self._require_room(len(head) + len(body))
            try:
                for number, name in enumerate(names):
                    start = number * self._part_bytes
                    self._client.set(name, body[start : start + self._part_bytes], ex=_STAGING_S)
                is_mine, are_whole = self._publish(space, key, parts.pack() + head, names)
            except BaseException:
                self._drop_quietly(names)
                raise
            if is_mine and are_whole:
                return True
            if is_mine:
                self._forget(space, {key: parts.pack()})
            self._drop_quietly(names)
        if is_mine:
            raise CapacityError(f"{self._where} evicted {key} while it was written; give the server more memory")
        return False

    def keys(self, space: str) -> frozenset[str]:
        """See `KVStore`. Complexity: a round trip and two of a few hundred names, and all names if any has changed."""
        with self._errors("listed"):
            try:
                return self._listed(space)
            except self._redis.ResponseError as error:
                if _WRONG_TYPE not in str(error):
                    raise
                # Something else was put in the place of the index: it is made again.
                self._unlink([self._names(space), self._token(space)])
                return self._listed(space)

    def heads(self, space: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `KVStore`. Complexity: two round trips per 64 heads."""
        for start in range(0, len(keys), _BATCH):
            with self._errors("asked"):
                for key, raw, parts in self._some_heads(space, keys[start : start + _BATCH]):
                    yield key, self._whole_head(space, key, raw, parts)

    def read(self, space: str, key: str, offset: int, into: memoryview) -> None:
        """See `KVStore`. One round trip if the head was asked for before."""
        with self._errors("read"):
            parts = self._known.get((space, key)) or self._ask_parts(space, key)
            for _ in range(2):
                if parts is None:
                    break
                if offset + len(into) > parts.num_bytes:
                    raise StoreMissError(
                        f"{key} on {self._where} has {parts.num_bytes} bytes, not {offset + len(into)}"
                    )
                now = self._fill(space, key, parts, offset, into)
                if now == parts:
                    return
                parts = now  # another process has put it anew
        raise StoreMissError(f"{self._where} has no {key} any more")

    def remove(self, space: str, key: str) -> None:
        """See `KVStore`."""
        with self._errors("changed"):
            raw = self._beginning(space, key)
            self._forget(space, {key: raw})
            parts = Parts.unpack(raw)
            if parts is not None:
                self._unlink(parts.names(self._body_prefix(space, key)))
            self._remember(space, key, None)

    def touch(self, space: str, keys: Iterable[str]) -> None:
        """See `KVStore`. Their time to live begins anew; for the server they are used."""
        with self._errors("changed"):
            wanted = list(keys)
            for start in range(0, len(wanted), _BATCH):
                self._touch(space, wanted[start : start + _BATCH])

    def close(self) -> None:
        """See `KVStore`."""
        with suppress(self._redis.RedisError, OSError):
            self._client.close()

    def _listed(self, space: str) -> frozenset[str]:
        listing = self._listings.get(space)
        self._forget_expired(space)
        if listing is not None:
            self._forget_evicted(space, listing)
        if listing is None or not listing.is_still(self._client.get(self._token(space))):
            listing = self._list(space)
            self._listings[space] = listing
        return listing.keys

    def _some_heads(self, space: str, keys: Sequence[str]) -> list[tuple[str, bytes | None, Parts | None]]:
        """How the heads of objects begin that are whole: the server may have evicted a body alone."""
        with self._client.pipeline(transaction=False) as batch:
            for key in keys:
                batch.getrange(self._head(space, key), 0, _FIRST_BYTES - 1)
            found = dict(zip(keys, map(_text, batch.execute(raise_on_error=False)), strict=True))
        there = {key: parts for key, raw in found.items() if (parts := Parts.unpack(raw))}
        with self._client.pipeline(transaction=False) as batch:
            for key, parts in there.items():
                batch.exists(*parts.names(self._body_prefix(space, key)) or [self._head(space, key)])
            counts = dict(zip(there, batch.execute(), strict=True))
        torn = {key for key, parts in there.items() if counts[key] < parts.count}
        gone = {key: raw[:PARTS_BYTES] for key, raw in found.items() if not raw or key in torn}
        if gone:
            self._forget(space, gone)
            self._drop_quietly([name for key in torn for name in there[key].names(self._body_prefix(space, key))])
        for key in keys:
            self._remember(space, key, None if key in gone else there.get(key))
        return [(key, None if key in gone else found[key], there.get(key)) for key in keys]

    def _whole_head(self, space: str, key: str, raw: bytes | None, parts: Parts | None) -> bytes | None:
        """What was put as a head, by how it begins; what is damaged comes as it is, so that it is found to be."""
        if raw is None or parts is None:
            return raw
        if len(raw) == _FIRST_BYTES:  # a byte more than there may be says that it is too long
            rest = self._client.getrange(self._head(space, key), _FIRST_BYTES, PARTS_BYTES + LONGEST_HEAD_BYTES)
            raw += rest if len(raw) + len(rest) <= PARTS_BYTES + LONGEST_HEAD_BYTES else b""
        return raw[PARTS_BYTES:]

    def _beginning(self, space: str, key: str) -> bytes:
        """Where a head says that the body lies; empty if there is none, or something that is no text."""
        with self._client.pipeline(transaction=False) as batch:
            batch.getrange(self._head(space, key), 0, PARTS_BYTES - 1)
            return _text(*batch.execute(raise_on_error=False))

    def _require_room(self, num_bytes: int) -> None:
        """Refuse what is longer than the server's memory: writing it would drive out all others."""
        try:
            limit = self._client.info("memory").get("maxmemory", 0)
        except self._redis.ResponseError:  # those who host the server may forbid it
            return
        if limit and num_bytes > limit:
            raise CapacityError(f"{num_bytes} bytes do not fit into {self._where}, which may use {limit}")

    def _publish(self, space: str, key: str, head: bytes, names: list[str]) -> tuple[bool, bool]:
        """Publish an object; return whether it is the one that is visible, and whether all of its parts are there."""
        expiry = self._expiry()
        with self._client.pipeline(transaction=True) as batch:
            for name in names:
                self._live_on(batch, name)
            batch.set(self._head(space, key), head, nx=True, ex=self._ttl_s or None)
            self._index(batch, space, {key: expiry})
            batch.delete(self._token(space))
            if names:  # by itself: of a repeated transaction `PERSIST` says that nothing was to be done
                batch.exists(*names)
            answers = batch.execute()
        is_mine = answers[len(names)] is not None
        if not is_mine:  # unless the transaction was repeated because its answer was lost
            is_mine = self._beginning(space, key) == head[:PARTS_BYTES]
        return is_mine, not names or answers[-1] == len(names)

    def _fill(self, space: str, key: str, parts: Parts, offset: int, into: memoryview) -> Parts | None:
        """Read; gives where the parts are by now, so that `into` counts only if that is where they were."""
        names = parts.names(self._body_prefix(space, key))
        spans = list(parts.spans(offset, len(into), _PIECE_BYTES))
        step = _ROUND_BYTES // _PIECE_BYTES
        for first in range(0, max(len(spans), 1), step):
            with self._client.pipeline(transaction=False) as batch:
                batch.getrange(self._head(space, key), 0, PARTS_BYTES - 1)
                for span in spans[first : first + step]:
                    batch.getrange(names[span.part], span.start, span.stop - 1)
                raw, *found = map(_text, batch.execute(raise_on_error=False))
            now = Parts.unpack(raw)
            self._remember(space, key, now)
            if now != parts:
                if not raw:
                    self._forget(space, {key: b""})
                return now
            for span, piece in zip(spans[first : first + step], found, strict=True):
                if len(piece) != span.stop - span.start:
                    self._forget(space, {key: raw})
                    self._drop_quietly(names)
                    return None
                into[span.into : span.into + len(piece)] = piece
        return parts

    def _ask_parts(self, space: str, key: str) -> Parts | None:
        raw = self._beginning(space, key)
        if not raw:
            self._forget(space, {key: b""})
        return Parts.unpack(raw)

    def _touch(self, space: str, keys: Sequence[str]) -> None:
        expiry = self._expiry()
        with self._client.pipeline(transaction=False) as batch:
            for key in keys:
                batch.getrange(self._head(space, key), 0, PARTS_BYTES - 1)
            answers = batch.execute(raise_on_error=False)
            found = {key: Parts.unpack(_text(raw)) for key, raw in zip(keys, answers, strict=True)}
        present = {key: parts for key, parts in found.items() if parts is not None}
        if not present:
            return
        with self._client.pipeline(transaction=False) as batch:
            for key, parts in present.items():
                for name in (self._head(space, key), *parts.names(self._body_prefix(space, key))):
                    self._live_on(batch, name)
            batch.execute()
            self._index(batch, space, dict.fromkeys(present, expiry))
            with suppress(self._redis.exceptions.OutOfMemoryError):  # a full server keeps the time that it had
                batch.execute()

    def _live_on(self, batch: Any, name: str) -> None:  # noqa: ANN401
        """Begin a time to live anew."""
        if self._ttl_s:
            batch.expire(name, self._ttl_s)
        else:
            batch.persist(name)

    def _expiry(self) -> float:
        """When what is written now expires, by the server's clock."""
        if not self._ttl_s:
            return float("inf")
        seconds, _ = self._client.time()
        return float(seconds + self._ttl_s)

    def _index(self, batch: Any, space: str, expiries: dict[str, float]) -> None:  # noqa: ANN401
        batch.zadd(self._names(space), expiries)
        if self._ttl_s:
            batch.expire(self._names(space), self._ttl_s + _INDEX_SPARE_S)

    def _index_again(self, space: str, key: str) -> None:
        """Name an object that is there already: the index may have been evicted."""
        if self._client.zadd(self._names(space), {key: self._expiry()}, nx=True):
            self._client.delete(self._token(space))

    def _forget_expired(self, space: str) -> None:
        oldest = self._client.zrange(self._names(space), 0, 0, withscores=True)
        if not oldest or oldest[0][1] == float("inf"):
            return
        seconds, _ = self._client.time()
        if oldest[0][1] <= seconds:
            with self._client.pipeline(transaction=True) as batch:
                batch.zremrangebyscore(self._names(space), "-inf", seconds)
                batch.delete(self._token(space))
                batch.execute()

    def _forget_evicted(self, space: str, listing: _Listing) -> None:
        """Look for some of the names; `EXISTS` does not count as a use."""
        checked = listing.next_names()
        heads = [self._head(space, key) for key in checked]
        if not heads or self._client.exists(*heads) == len(heads):
            return
        with self._client.pipeline(transaction=False) as batch:
            for head in heads:
                batch.exists(head)
            gone = {key: b"" for key, is_there in zip(checked, batch.execute(), strict=True) if not is_there}
        if gone:
            self._forget(space, gone)

    def _forget(self, space: str, beginnings: dict[str, bytes]) -> None:
        """Take objects out of the index if their heads still begin so; empty stands for one that is gone."""
        names = [self._names(space), self._token(space), *(self._head(space, key) for key in beginnings)]
        arguments = [part for key, beginning in beginnings.items() for part in (beginning, key)]
        self._client.eval(_FORGET, len(names), *names, *arguments)

    def _list(self, space: str) -> _Listing:
        """Read the index. The token is set before that and taken away by every change."""
        if self._client.zscore(self._names(space), _WHOLE) is None:
            found = self._look_for_heads(space)
            try:
                self._write_index(space, found)
            except self._redis.exceptions.OutOfMemoryError:  # then it is looked for each time
                return _Listing(None, frozenset(found))
        with suppress(self._redis.exceptions.OutOfMemoryError):  # then it is read each time
            self._client.set(self._token(space), secrets.token_hex(8), nx=True, ex=self._index_ttl_s())
        with self._client.pipeline(transaction=True) as batch:
            batch.get(self._token(space))
            batch.zrange(self._names(space), 0, -1)
            token, members = batch.execute()
        return _Listing(token, frozenset(_names_among(members)))

    def _look_for_heads(self, space: str) -> list[str]:
        """Find what there is: the server has no index, because it has evicted it or has just begun."""
        prefix = self._heads(space)
        pattern = "".join(f"\\{letter}" if letter in "*?[]^\\" else letter for letter in prefix) + "*"
        found = self._client.scan_iter(match=pattern, count=1000)
        return list(_names_among(name.removeprefix(prefix.encode()) for name in found))

    def _write_index(self, space: str, found: list[str]) -> None:
        expiry = self._expiry()
        with self._client.pipeline(transaction=True) as batch:
            if found:
                batch.zadd(self._names(space), dict.fromkeys(found, expiry), nx=True)
            self._index(batch, space, {_WHOLE: float("inf")})
            batch.delete(self._token(space))
            batch.execute()

    def _index_ttl_s(self) -> int | None:
        return self._ttl_s + _INDEX_SPARE_S if self._ttl_s else None

    def _drop_quietly(self, names: list[str]) -> None:
        with suppress(self._redis.RedisError, OSError):  # they expire
            self._unlink(names)

    def _unlink(self, names: list[str]) -> None:
        if names:
            self._client.unlink(*names)

    def _remember(self, space: str, key: str, parts: Parts | None) -> None:
        with self._lock:
            self._known.pop((space, key), None)
            if parts is not None:
                self._known[space, key] = parts
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        """Turn the client's errors into ours, in one line without a password."""
        try:
            yield
        except self._redis.exceptions.OutOfMemoryError as error:
            line = f"{self._where} is full; give it more memory or the policy allkeys-lru"
            raise (CapacityError if done == "written to" else StoreError)(line) from error
        except (self._redis.RedisError, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self._where} cannot be {done}: {one_line(error)}") from error

    def _head(self, space: str, key: str) -> str:
        return self._heads(space) + require_name(key)

    def _heads(self, space: str) -> str:
        return f"{self._prefix}:h:{require_name(space)}:"

    def _body_prefix(self, space: str, key: str) -> str:
        return f"{self._prefix}:b:{require_name(space)}:{require_name(key)}"

    def _names(self, space: str) -> str:
        return f"{self._prefix}:i:{require_name(space)}"

    def _token(self, space: str) -> str:
        return f"{self._prefix}:v:{require_name(space)}"


def _text(answer: Any) -> bytes:  # noqa: ANN401
    """An answer that should be text; nothing if a list, or the like, was put in its place."""
    if not isinstance(answer, Exception):
        return bytes(answer)
    if _WRONG_TYPE in str(answer):
        return b""
    raise answer


def _names_among(raw: Iterable[bytes]) -> Iterator[str]:
    """Yield what can be names of objects: other things may have been put beside them."""
    names = (each.decode("ascii", "replace") for each in raw)
    return (name for name in names if is_name(name))


class _Listing:
    """The index of a space as it was last read.

    Attributes:
        token: The server's at that time; another one, or none, says that the index has changed.
        keys: Names of objects.
    """

    def __init__(self, token: bytes | None, keys: frozenset[str]) -> None:
        self.token = token
        self.keys = keys
        self._in_turn = list(keys)
        self._next = 0

    def is_still(self, token: bytes | None) -> bool:
        """Whether nothing has changed, if that is the server's token now."""
        return token is not None and token == self.token

    def next_names(self) -> list[str]:
        """Some names, others each time until all had their turn."""
        start, self._next = self._next, self._next + _CHECKED
        if self._next >= len(self._in_turn):
            self._next = 0
        return self._in_turn[start : start + _CHECKED]
