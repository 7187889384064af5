"""Prompts shaped as those of real agent clients: what is the same from call to call, what moves, and what a session changes.

Every client that was recorded sends instructions, its tools and the project's notes first, puts something of the session into
the first lines, appends call after call, reads files again, and has sub-agents with other instructions before the same tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.testing.tiny_models import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]

RUN = 16
"""Shortest run of known tokens that the bound counts."""


class Call(NamedTuple):
    """A prompt, and what happens in it."""

    about: str
    prompt: Tokens


class Client:
    """A coding agent: instructions, tools, and projects with notes and files."""

    def __init__(self, seed: int, *, num_tools: int = 9, num_files: int = 3) -> None:
        self._rng = np.random.default_rng(seed)
        self._instructions, self._helper = self._new(350), self._new(120)
        self._tools = [self._new(int(length)) for length in self._rng.integers(60, 220, num_tools)]
        self._notes = [self._new(400) for _ in range(2)]
        self._files = [[self._new(int(length)) for length in self._rng.integers(150, 600, num_files)] for _ in range(2)]

    def calls(self) -> Iterator[Call]:
        """Yield a day's calls: two tasks, a sub-agent, another project, a compaction, and the first project again."""
        first = self._front(self._instructions, 0)
        yield from self._steps("first task", first, [0, 1, 2, 0, 1], project=0)
        yield from self._steps("new session", self._front(self._instructions, 0), [1, 0, 1], project=0)
        yield from self._steps("sub-agent", self._front(self._helper, 0), [2, 1], project=0)
        yield from self._steps("other project", self._front(self._instructions, 1), [0, 1, 2, 0], project=1)
        summary = [*self._front(self._instructions, 1), self._new(150), self._files[1][2]]
        yield from self._steps("after a compaction", summary, [0, 1], project=1)
        yield from self._steps("next day", self._front(self._instructions, 0), [2, 2, 0], project=0)

    def _front(self, instructions: Tokens, project: int) -> list[Tokens]:
        """What a session begins with; the second line is of this session alone."""
        return [self._instructions[:9], self._new(6), instructions[9:], *self._tools, self._notes[project]]

    def _steps(self, about: str, front: Sequence[Tokens], files: Iterable[int], *, project: int) -> Iterator[Call]:
        """A question, then a call and what it gave, turn by turn: files that the client reads, maybe again."""
        said = [*front, self._new(40)]
        yield Call(about, np.concatenate(said))
        for number in files:
            said += [self._new(30), self._files[project][number], self._new(4)]
            yield Call(about, np.concatenate(said))

    def _new(self, length: int) -> Tokens:
        return self._rng.integers(3, VOCABULARY, length)


class Known:
    """Runs of `RUN` tokens that were asked for: what no method can do without computing, whatever it keeps."""

    def __init__(self) -> None:
        self._grams: set[bytes] = set()

    def take(self, prompt: Tokens) -> int:
        """Return the tokens of a prompt in no known run, and know them from now on."""
        windows = np.lib.stride_tricks.sliding_window_view(prompt, RUN)
        grams = [window.tobytes() for window in windows]
        is_known = np.zeros(len(prompt), np.bool_)
        for start, gram in enumerate(grams):
            if gram in self._grams:
                is_known[start : start + RUN] = True
        self._grams.update(grams)
        return int((~is_known).sum())
