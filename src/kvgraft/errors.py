"""The one tree of exceptions that kvgraft raises. Messages are one line and name the remedy."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_LINE = 240


class KVGraftError(Exception):
    """Base of every error that kvgraft raises on purpose."""


class ConfigError(KVGraftError, ValueError):
    """An argument, a setting or an input file is wrong.

    Attributes:
        argument: Name of the argument, where it is one; servers use the name that their clients know.
    """

    def __init__(self, message: str = "", argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class ContextLengthError(ConfigError):
    """A prompt is longer than the model, or the pool of slots, has room for."""


class CapacityError(KVGraftError):
    """More KV slots, tokens or bytes were asked for than can be had, even after eviction."""


class OverloadedError(KVGraftError):
    """The server has as many requests waiting as it accepts, or is shutting down; try again later."""


class UnknownSessionError(ConfigError):
    """There is no such session, or it is not the caller's."""


class SessionInUseError(ConfigError):
    """A session has a turn that is not done, or its name is taken."""


class RequestError(KVGraftError):
    """The engine failed while it computed a request; others go on."""


class UnservableError(RequestError):
    """A request turns out to be impossible while it is computed: its own fault, and no failure of the engine.

    Attributes:
        argument: Name of the argument that asks for it, where it is one.
    """

    argument: str | None = None


class NothingToDrawError(UnservableError):
    """A request's rules leave no token."""


class StructureError(UnservableError):
    """A request's structure cannot be followed: it is too large, too ambiguous, or breaks what follows it."""

    argument = "structure"


class ModelError(KVGraftError):
    """A model cannot be loaded, or the self-check does not accept it."""


class PolicyError(KVGraftError):
    """A selection policy failed, chose what cannot be computed, or its drift correction failed; all is computed then."""


class StoreError(KVGraftError, OSError):
    """A KV store could not keep or give back what it was asked for."""


class StoreMissError(StoreError):
    """A KV store does not have, or no longer has, what it was asked for."""


class IntegrationError(KVGraftError):
    """An engine's interface is not what an adapter was written for."""


class CorruptCacheError(KVGraftError):
    """An invariant of a cache, pool or catalogue does not hold."""


@contextmanager
def about(argument: str) -> Iterator[None]:
    """Say of each `ConfigError` which argument it is about, unless that has been said already."""
    try:
        yield
    except ConfigError as error:
        error.argument = error.argument or argument
        raise


def one_line(error: BaseException) -> str:
    """Say what a foreign error is, in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return message if len(message) <= _LONGEST_LINE else message[:_LONGEST_LINE] + "..."


OUT_OF_MEMORY = "out of memory; lower num_slots or kv_bytes, host_bytes, max_rows or donor_tokens"
"""Message where memory is out and nothing more is known."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that no memory is left: Python's own, or one of torch's by its text."""
    caused: BaseException | None = error
    while caused is not None:
        if isinstance(caused, MemoryError):
            return True
        if isinstance(caused, RuntimeError | OSError) and any(words in str(caused).lower() for words in _NO_MEMORY):
            return True
        caused = caused.__cause__
    return False
