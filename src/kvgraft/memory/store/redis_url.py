"""The Redis or Valkey server that a URL names. Errors never show the password."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from kvgraft.config.setting import setting
from kvgraft.errors import ConfigError, StoreError, one_line
from kvgraft.memory.store.options import read_options
from kvgraft.memory.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

_SCHEMES = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix"}
"""Names of the store, and what redis-py calls them."""
_GROUP = "Redis store"
_RETRIES = 1
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.02, 0.2


@dataclass(frozen=True)
class RedisOptions:
    """Options after the question mark of `redis://HOST:PORT/DB?`."""

    ttl_s: int = setting(86400, "how long a donor lives that is not touched; 0 is for ever", _GROUP, low=0, high=10**9)
    timeout_s: float = setting(5.0, "how long the server may be silent before a call fails", _GROUP, above=0)
    value_bytes: int = setting(
        64 << 20, "longest value; longer donors lie in several", _GROUP, low=1 << 10, high=512 << 20, size=True
    )
    prefix: str = setting("kvgraft", "prefix of all keys", _GROUP)


@dataclass(frozen=True)
class TLSOptions(RedisOptions):
    """Options after the question mark of `rediss://HOST:PORT/DB?`."""

    ssl_ca_certs: str = setting("", "file of certificates that are trusted", _GROUP, may_be_empty=True)
    ssl_certfile: str = setting("", "file of the client's certificate", _GROUP, may_be_empty=True)
    ssl_keyfile: str = setting("", "file of its key", _GROUP, may_be_empty=True)


@dataclass(frozen=True)
class SocketOptions(RedisOptions):
    """Options after the question mark of `unix://[USER:PASSWORD@]/PATH?`."""

    db: int = setting(0, "number of the database", _GROUP, low=0)


_OPTIONS = {"redis": RedisOptions, "rediss": TLSOptions, "unix": SocketOptions}


def open_redis_store(name: str, where: str, options: Mapping[str, str]) -> RedisStore:
    """Open the store of `NAME://[USER:PASSWORD@]HOST[:PORT][/DB]?OPTION=VALUE&...`.

    A server that cannot be reached is no error: it may be there later.

    Raises:
        ConfigError: The URL cannot be read, or the server does not let us in.
        ImportError: redis-py is not installed.
    """
    scheme = _SCHEMES[name]
    chosen = read_options(name, _OPTIONS[scheme], options)
    shown = _shown(name, scheme, where)
    client = _client(f"{scheme}:{where}", chosen, shown)
    store = RedisStore(
        client, name=name, where=shown, ttl_s=chosen.ttl_s, part_bytes=chosen.value_bytes, prefix=chosen.prefix
    )
    try:
        store.ping()
    except StoreError as error:
        if _is_refusal(error.__cause__):
            store.close()
            raise ConfigError(f"store {shown} does not let us in ({error.__cause__}); correct its URL") from None
        logger.warning("%s; it is tried again when it is needed", one_line(error))
    return store


def _shown(name: str, scheme: str, where: str) -> str:
    """The URL without user and password, if redis-py would read it as it is meant.

    Raises:
        ConfigError: It has no host or path, a wrong port, or a database that is no number.
    """
    form = "unix:///PATH?db=0" if scheme == "unix" else f"{name}://[USER:PASSWORD@]HOST[:PORT][/DB]"
    wrong = ConfigError(
        f"the address of store {name!r} cannot be read; write {form}, and in a password %-codes for any of @:/?#,%&"
    )
    try:
        url = urlsplit(f"{scheme}:{where}")
        host, port = url.hostname, url.port
    except ValueError:
        raise wrong from None  # the message of urllib may hold a part of the password
    database = url.path.strip("/")
    if url.fragment or url.query or not where.startswith("//"):
        raise wrong
    if scheme == "unix":
        if not database:
            raise wrong
        return f"{name}://{quote(url.path)}"
    if not host or not (database == "" or database.isdecimal()):
        raise wrong
    host = f"[{host}]" if ":" in host else host
    return f"{name}://{host}:{port or 6379}/{database or 0}"


def _client(url: str, options: RedisOptions, shown: str) -> Any:  # noqa: ANN401 - redis-py is not always there
    try:
        import redis
        from redis.backoff import ExponentialBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ImportError(f"store {shown} needs redis-py: pip install 'kvgraft[redis]'", name="redis") from error
    more = {
        key: value
        for key in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "db")
        if (value := getattr(options, key, ""))
    }
    # A connection that broke is made anew after a moment. One that is silent is not tried again, or a server that hangs would
    # cost several timeouts.
    back_off = ExponentialBackoff(cap=_LONGEST_BACK_OFF_S, base=_FIRST_BACK_OFF_S)
    retry = Retry(back_off, _RETRIES, supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(
        url,
        protocol=2,
        retry=retry,
        socket_timeout=options.timeout_s,
        socket_connect_timeout=options.timeout_s,
        health_check_interval=0,
        **more,
    )


def _is_refusal(error: BaseException | None) -> bool:
    """Whether asking again is of no use: the password, the rights, the number of the database."""
    import redis

    refusals = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
    if isinstance(error, refusals):
        return True
    return isinstance(error, redis.ResponseError) and "DB index" in str(error)
