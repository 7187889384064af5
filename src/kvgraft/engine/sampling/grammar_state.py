"""State of an output in its grammar. The mask of the next token is found beside the forward pass that computes it.

A worker thread takes the token that was drawn and finds which may follow (llguidance lets go of the interpreter's lock
meanwhile), so that a step waits only for a mask that takes longer than a forward pass. One that computes for longer than
`_LONGEST_MASK_S` fails its request, and the others go on; that it waits for a thread or a processor is not its fault. A
state needs no end: what is on its way when a request is cancelled ends by itself, and nothing else holds it.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from kvgraft.errors import RequestError, StructureError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray
    from torch import Tensor

_LONGEST_MASK_S = 1.0
"""Time of its thread that a mask may take. llguidance's counters (`grammars`) let none take nearly as long."""
_LONGEST_WAIT_S = 60.0
"""Seconds that a step waits for one mask, for any reason."""
_LEAST_WAIT_S = 0.01
_FEW = 0.25
"""Share of all tokens up to which it pays to draw from those alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Tokens of a model.

    Some tokens have the same bytes, as `a` and `<0x61>` in vocabularies of SentencePiece. llguidance names one of them only.

    Attributes:
        size: Token ids that llguidance knows; others are never allowed.
        twins: (num_twins,) int64, tokens with bytes that others have, too.
        twin_groups: (num_twins,) int64, equal where bytes are.
    """

    size: int
    twins: NDArray[np.int64]
    twin_groups: NDArray[np.int64]

    @staticmethod
    def of(texts: Sequence[bytes | None]) -> Vocabulary:
        """Return the tokens with these bytes; None for special ones and for those that are none."""
        groups: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(texts):
            if text:
                groups.setdefault(text, []).append(token_id)
        twins = [group for group in groups.values() if len(group) > 1]
        return Vocabulary(
            len(texts),
            np.array([token_id for group in twins for token_id in group], np.int64),
            np.array([number for number, group in enumerate(twins) for _ in group], np.int64),
        )

    def allowed(self, bits: bytes) -> NDArray[np.bool_]:
        """Return (size,) which tokens may follow, from llguidance's mask of a bit per token."""
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=self.size, bitorder="little").view(np.bool_)
        if len(self.twins):
            is_any = np.bincount(self.twin_groups, allowed[self.twins]) > 0
            allowed[self.twins] = is_any[self.twin_groups]
        return allowed


class Matcher(Protocol):
    """The part of llguidance's matcher that is used here: a place in a grammar that moves."""

    def deep_copy(self) -> Matcher:
        """Return another one at the same place."""

    def consume_token(self, token_id: int, /) -> bool:
        """Go on; whether the token may stand there."""

    def compute_bitmask(self) -> bytes:
        """Return a bit per token, the lowest first: which may follow."""

    def is_error(self) -> bool:
        """Return whether it failed; it never recovers."""

    def get_error(self) -> str:
        """Return why."""


class _Place(NamedTuple):
    """A place in a grammar; never changed once it is there.

    Attributes:
        matcher: llguidance's matcher, at that place; copied before it goes on if others may start here, too.
        ceiling: (vocabulary.size,) float32, infinity for tokens that may follow and minus infinity for others.
        few: int64 (num_few,), the tokens that may follow, ascending; None if they are more than `_FEW` of all.
    """

    matcher: Matcher
    ceiling: Tensor
    few: Tensor | None


class _Search:
    """A place that a worker thread finds, and how long that takes. Shared by states that go on from there."""

    def __init__(self, found: Future[_Place]) -> None:
        self._found = found
        self._clock: Callable[[], float] | None = None
        self._began = 0.0

    @staticmethod
    def done(place: _Place) -> _Search:
        """The place is known."""
        found: Future[_Place] = Future()
        found.set_result(place)
        return _Search(found)

    @staticmethod
    def begun(executor: Executor, find: Callable[[], _Place]) -> _Search:
        """Have a thread look for it, as soon as one is free."""
        search = _Search(Future())
        executor.submit(search.run, find)
        return search

    def run(self, find: Callable[[], _Place]) -> None:
        """Look for the place, on this thread."""
        clock = _own_time()
        self._began = clock()
        self._clock = clock
        try:
            place = find()
        except BaseException as error:  # noqa: BLE001 - it is raised where the place is waited for
            self._found.set_exception(error)
        else:
            self._found.set_result(place)

    def result(self) -> _Place:
        """Wait for the place.

        Raises:
            StructureError: There is none, or it takes too long.
            RequestError: The machine is too busy to find it.
        """
        deadline, left_s = time.monotonic() + _LONGEST_WAIT_S, _LONGEST_MASK_S
        while True:
            try:
                return self._found.result(timeout=max(left_s, _LEAST_WAIT_S))
            except TimeoutError as error:
                left_s = _LONGEST_MASK_S - self._spent_s()
                if left_s <= 0:
                    raise StructureError(
                        f"the structure cannot be followed further: a token took it over {_LONGEST_MASK_S:g} s; simplify it"
                    ) from error
                if time.monotonic() >= deadline:
                    raise RequestError(
                        f"the structure was not followed within {_LONGEST_WAIT_S:g} s: the machine is overloaded; try again"
                    ) from error

    def _spent_s(self) -> float:
        """Seconds that it has computed so far; 0 before its beginning."""
        try:
            return 0.0 if self._clock is None else self._clock() - self._began
        except OSError:  # it is done, and its thread has ended
            return 0.0


def _own_time() -> Callable[[], float]:
    """Return a clock of the seconds that this thread computes, for any thread to read; of all seconds where there is none."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return time.monotonic if clock_of is None else partial(time.clock_gettime, clock_of(threading.get_ident()))


class Grammar:
    """A compiled structure (`kvgraft.engine.sampling.structure.Structure`)."""

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary, executor: Executor) -> None:
        """Find what may come first.

        Args:
            matcher: llguidance's matcher, at the beginning.
            vocabulary: Of the model.
            executor: Its threads find masks.

        Raises:
            StructureError: Nothing may come.
        """
        self._first = _place(matcher, vocabulary)
        self._vocabulary = vocabulary
        self._executor = executor

    def start(self) -> GrammarState:
        """Return the state before the first token."""
        return GrammarState(_Search.done(self._first), self._vocabulary, self._executor)


class GrammarState:
    """The state of one request (`kvgraft.engine.sampling.structure.StructureState`)."""

    def __init__(self, here: _Search, vocabulary: Vocabulary, executor: Executor) -> None:
        self._here = here
        self._vocabulary = vocabulary
        self._executor = executor
        self._is_shared = True

    def mask(self, logits: Tensor) -> Tensor:
        """Return float32 (vocab_size,) logits that are minus infinity where a token would break the structure.

        Raises:
            StructureError: The structure cannot be followed further.
            RequestError: The machine is too busy to follow it.
        """
        ceiling = self._here.result().ceiling
        if len(ceiling) < len(logits):  # rows of the model's head for which there is no token
            ceiling = torch.nn.functional.pad(ceiling, (0, len(logits) - len(ceiling)), value=-torch.inf)
        return logits.minimum(ceiling[: len(logits)].to(logits.device))

    def few(self, num_logits: int) -> Tensor | None:
        """Return int64 (num_few,) which of `num_logits` tokens may follow, ascending; None if they are not few.

        Raises:
            StructureError: The structure cannot be followed further.
            RequestError: The machine is too busy to follow it.
        """
        place = self._here.result()
        if place.few is None or num_logits >= len(place.ceiling):
            return place.few
        known = place.few[place.few < num_logits]
        return known if len(known) else None

    def accept(self, token_id: int) -> None:
        """Go on after a token that was drawn from what `mask` or `few` left; what follows is found out in the background."""
        here, must_copy = self._here.result(), self._is_shared
        self._is_shared = False
        advance = partial(_after, here.matcher, token_id, self._vocabulary, must_copy=must_copy)
        self._here = _Search.begun(self._executor, advance)

    def fork(self) -> GrammarState:
        """Return a copy that goes its own way."""
        self._is_shared = True
        return GrammarState(self._here, self._vocabulary, self._executor)


def _after(matcher: Matcher, token_id: int, vocabulary: Vocabulary, *, must_copy: bool) -> _Place:
    """Return the place after a token. Runs on a worker thread.

    Raises:
        StructureError: The token breaks the structure, or the backend fails.
    """
    try:
        matcher = matcher.deep_copy() if must_copy else matcher
        matcher.consume_token(token_id)
    except BaseException as error:  # a panic of the backend must end this request, not the engine's thread
        raise StructureError(f"the structure cannot be followed further: {one_line(error)}") from error
    return _place(matcher, vocabulary)


def _place(matcher: Matcher, vocabulary: Vocabulary) -> _Place:
    try:
        bits = matcher.compute_bitmask()
        problem = matcher.get_error().splitlines()[:1] if matcher.is_error() else []
    except BaseException as error:  # as above
        raise StructureError(f"the structure cannot be followed further: {one_line(error)}") from error
    allowed = vocabulary.allowed(bits)
    if problem or not allowed.any():
        reason = problem[0] if problem else "no token of the model goes on in it"
        raise StructureError(f"the structure cannot be followed further: {reason}; simplify it")
    ids = np.flatnonzero(allowed)
    ceiling = np.where(allowed, np.float32(np.inf), np.float32(-np.inf))
    few = torch.from_numpy(ids) if len(ids) <= _FEW * len(allowed) else None
    return _Place(matcher, torch.from_numpy(ceiling), few)
