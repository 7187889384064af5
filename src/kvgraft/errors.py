"""The one tree of exceptions that kvgraft raises. Messages are one line and name the remedy."""

from __future__ import annotations

_LONGEST_LINE = 240


class KVGraftError(Exception):
    """Base of every error that kvgraft raises on purpose."""


class ConfigError(KVGraftError, ValueError):
    """An argument, a setting or an input file is wrong."""


class CapacityError(KVGraftError):
    """More KV slots, tokens or bytes were asked for than can be had, even after eviction."""


class OverloadedError(KVGraftError):
    """The server has as many requests waiting as it accepts, or is shutting down; try again later."""


class RequestError(KVGraftError):
    """The engine failed while it computed a request; others go on."""


class ModelError(KVGraftError):
    """A model cannot be loaded, or the self-check does not accept it."""


class StoreError(KVGraftError, OSError):
    """A KV store could not keep or give back what it was asked for."""


class IntegrationError(KVGraftError):
    """An engine's interface is not what an adapter was written for."""


class CorruptCacheError(KVGraftError):
    """An invariant of a cache, pool or catalogue does not hold."""


def one_line(error: BaseException) -> str:
    """Say what a foreign error is, in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return message if len(message) <= _LONGEST_LINE else message[:_LONGEST_LINE] + "..."
