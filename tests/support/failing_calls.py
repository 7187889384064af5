"""Let one call fail with MemoryError: of kvgraft's own functions, or of numpy by them, as where memory is out.

A place is a function that is called and the line that calls it. A first run lists the places that a script comes by; each
further one lets one call at one place fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import kvgraft
from kvgraft.donors.secret import SECRET_BYTES, process_secret, set_process_secret

if TYPE_CHECKING:
    from collections.abc import Container

_ROOT = str(Path(kvgraft.__file__).parent)
_PATCHED = (
    "append",
    "argsort",
    "array_equal",
    "bincount",
    "concatenate",
    "count_nonzero",
    "cumsum",
    "delete",
    "flatnonzero",
    "full",
    "insert",
    "isin",
    "lexsort",
    "ones",
    "repeat",
    "searchsorted",
    "sort",
    "unique",
    "zeros_like",
)
"""Functions of numpy in Python, or behind a dispatcher: a profiler does not see calls of these."""

_OURS: dict[object, bool] = {}


class Place(NamedTuple):
    kind: str
    """`numpy` or `call`."""
    callee: str
    caller: str


class FailingCalls:
    """Watches this thread while it is entered, once or deeper; lets call number `number`, from 1, at `place` fail, once.

    Attributes:
        seen: Calls so far by place.
        has_failed: Whether the call has come and failed.
    """

    def __init__(self, place: Place | None = None, number: int = 0) -> None:
        self.seen: Counter[Place] = Counter()
        self.has_failed = False
        self._place = place
        self._number = number
        self._originals: dict[str, Any] = {}
        self._depth = 0
        self._thread = threading.get_ident()

    def watch_this_thread(self) -> None:
        """Watch the thread that calls, in place of the one that made this."""
        self._thread = threading.get_ident()

    @property
    def is_to_fail(self) -> bool:
        """Whether a call fails, or has failed."""
        return self._place is not None

    def __enter__(self) -> FailingCalls:
        self._depth += 1
        if self._depth == 1 and not self.has_failed:
            for name in _PATCHED:
                self._originals[name] = getattr(np, name)
                setattr(np, name, self._watched(name, self._originals[name]))
            self._unraisable_hook = sys.unraisablehook
            sys.unraisablehook = self._dropped
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        sys.setprofile(None)
        for name, original in self._originals.items():
            setattr(np, name, original)
        if self._originals:
            sys.unraisablehook = self._unraisable_hook
        self._originals.clear()

    def _dropped(self, unraisable) -> None:
        """Pass over our own failure where Python drops it: the call was the end of a generator that is not needed."""
        if not (self.has_failed and isinstance(unraisable.exc_value, MemoryError)):
            self._unraisable_hook(unraisable)

    def _watched(self, name, original):
        def call(*arguments, **options):
            caller = sys._getframe(1)
            if _is_ours(caller) and threading.get_ident() == self._thread:
                self._count("numpy", name, caller)
            return original(*arguments, **options)

        return call

    def _profile(self, frame, event, argument) -> None:
        if event == "c_call":
            if _is_ours(frame):
                owner = getattr(argument, "__self__", None)
                if isinstance(owner, np.ndarray) or getattr(argument, "__module__", "") == "numpy":
                    self._count("numpy", argument.__name__, frame)
        elif event == "call" and _is_ours(frame) and frame.f_back is not None:
            self._count("call", frame.f_code.co_qualname, frame.f_back)

    def _count(self, kind: str, callee: str, caller) -> None:
        if self._place is not None and callee != self._place.callee:
            return
        place = Place(kind, callee, _line(caller))
        self.seen[place] += 1
        if not self.has_failed and place == self._place and self.seen[place] == self._number:
            self.has_failed = True
            sys.setprofile(None)
            raise MemoryError(f"{place.callee} at {place.caller}")


@contextlib.contextmanager
def same_secret():
    """Make catalogues whose anchors are the same in every process, so that a run comes by the same calls in each."""
    before = process_secret()
    set_process_secret(bytes(SECRET_BYTES))
    try:
        yield
    finally:
        set_process_secret(before)


class EscapedError(Exception):
    """An exception went into the engine's own scheduler: the server would have ended."""


class Watched:
    """An object of ours, of which the engine makes some calls; these are watched as long as `calls` are."""

    def __init__(self, watched: object, names: Container[str], calls: contextlib.AbstractContextManager) -> None:
        self._watched, self._names, self.calls = watched, names, calls

    def __getattr__(self, name):
        method = getattr(self._watched, name)
        if name not in self._names:
            return method

        def call(*given, **named):
            try:
                with self.calls:
                    return method(*given, **named)
            except Exception as error:
                raise EscapedError from error

        return call


class CallDrill(ABC):
    """A script in which one call fails. Subclasses play it."""

    @abstractmethod
    def run(self, calls: FailingCalls) -> list[str]:
        """Play the script; returns what is wrong afterwards."""

    def is_guarded(self, place: Place) -> bool:
        """Whether a failure there is to be caught: nobody guards what tests call."""
        return place.caller.startswith("/")

    def places(self) -> list[tuple[Place, int]]:
        """Calls that a whole run comes by: of every place the first one, one in the middle and the last one."""
        calls = FailingCalls()
        assert self.run(calls) == []
        return [
            (place, number)
            for place, count in sorted(calls.seen.items())
            if self.is_guarded(place)
            for number in sorted({1, (count + 1) // 2, count})
        ]

    def failures(self, place: Place, number: int) -> list[str] | None:
        """What is wrong after the call has failed: nothing, as it should be; None if the run did not come by it."""
        calls = FailingCalls(place, number)
        found = self.run(calls)
        return found if calls.has_failed else None


def points_at(found: list[tuple[Place, int]], callee: str, caller: str) -> list[tuple[Place, int]]:
    """Return up to two of the points at which a function is called from a file, drawn alike in every process."""
    there = [(place, n) for place, n in found if place.callee == callee and place.caller.startswith(f"{caller}:")]
    assert there, f"the script does not come by {callee} in {caller} any more; name a function that it comes by"
    return random.Random(1).sample(there, min(2, len(there)))


def drawn(found: list[tuple[Place, int]], count: int) -> list[tuple[Place, int]]:
    """Draw points, alike in every process: by a digest of each, so that a list with one more gives nearly the same.

    Lines do not count, so that a new one above draws no others.
    """

    def digest(point: tuple[Place, int]) -> bytes:
        place, number = point
        named = (place.kind, place.callee, place.caller.partition(":")[0], number)
        return hashlib.blake2b(repr(named).encode(), digest_size=8).digest()

    return sorted(found, key=digest)[:count]


def _is_ours(frame) -> bool:
    code = frame.f_code
    known = _OURS.get(code)
    if known is None:
        known = _OURS[code] = code.co_filename.startswith(_ROOT)
    return known


def _line(frame) -> str:
    name = frame.f_code.co_filename
    return f"{name.removeprefix(_ROOT)}:{frame.f_lineno}" if name.startswith(_ROOT) else Path(name).name
