"""At which positions of a prompt states are recorded. A state is as large as the K/V of hundreds of tokens.

| policy | states are kept | for |
|---|---|---|
| `EndOfPrompt` | at the end | conversations: the next turn begins with this prompt; the same prompt again |
| `BranchingPoints` | at the end, and where it leaves text that is stored | system prompts, too, from their second use on |
| `EveryTokens` | at every so many tokens, and at the end | any prompt that begins alike, at many times the bytes |

Positions are what a match can end at: more than is stored already, less than the prompt, multiples of the cache's alignment.
The end of a prompt is in front of its last token, which is always computed: behind it the same prompt would find nothing.

Source: recording at branching points follows Marconi (Pan et al., arXiv 2411.19379).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvgraft.errors import ConfigError

_LEAST_GAIN = 2
"""Tokens from a state to a branching point that is recorded. Prompts that go on from another one leave its text one token
after the state in front of its last token. As many tokens as a state weighs would be too many: a system prompt of 30 tokens
that thousands of prompts begin with is worth its state (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPrompt:
    """A prompt that is about to be computed; lengths are tokens."""

    prompt_len: int
    prefix_len: int = 0
    """Where the match ended: a state is recorded there."""
    branching_len: int = 0
    """How far its tokens alone are stored (`StateMatchResult.branching_len`)."""
    alignment: int = 1
    """`StateRadixCache.state_alignment`."""

    @property
    def end(self) -> int:
        """The last position from which the same prompt can go on; 0 for none."""
        most = max(self.prompt_len - 1, 0)
        return most - most % self.alignment


class StateRecording(Protocol):
    """Chooses where the states of a prompt are recorded."""

    def positions(self, prompt: RecordingPrompt) -> list[int]:
        """Positions in ascending order, each in `(prefix_len, prompt_len)` and a multiple of the alignment."""


@dataclass(frozen=True, slots=True)
class EndOfPrompt:
    """One state per prompt, at its end."""

    max_states: int | None = None
    """States that one prompt may record; None for any number."""

    def positions(self, prompt: RecordingPrompt) -> list[int]:
        """The end."""
        return _affordable({prompt.end}, prompt, self.max_states)


@dataclass(frozen=True, slots=True)
class BranchingPoints:
    """At most two states per prompt: at its end, and where it leaves text that is stored without a state next to it."""

    max_states: int | None = None
    """States that one prompt may record; None for any number. One is spent on the branching point, if there is any."""

    def positions(self, prompt: RecordingPrompt) -> list[int]:
        """The branching point and the end."""
        branching = min(prompt.branching_len, prompt.end)
        places = {branching, prompt.end} if branching - prompt.prefix_len >= _LEAST_GAIN else {prompt.end}
        found = _affordable(places, prompt, None)
        return found if self.max_states is None else found[: self.max_states]


@dataclass(frozen=True, slots=True)
class EveryTokens:
    """States at multiples of an interval, and at the end."""

    interval: int
    """Tokens between two states; what is no multiple of the alignment is rounded up to one."""
    max_states: int | None = None
    """States that one prompt may record; None for any number. The last ones are kept, which save most."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"interval must be at least 1, not {self.interval}")

    def positions(self, prompt: RecordingPrompt) -> list[int]:
        """Multiples of the interval after `prefix_len`, and the end."""
        step = -(-self.interval // prompt.alignment) * prompt.alignment
        return _affordable({*range(step, prompt.end, step), prompt.end}, prompt, self.max_states)


def affordable_states(budget_bytes: int, state_bytes: int) -> int:
    """How many states a byte budget pays for: `max_states` of a policy.

    Raises:
        ConfigError: A state has no bytes, or the budget is negative.
    """
    if state_bytes < 1 or budget_bytes < 0:
        raise ConfigError(f"{budget_bytes} bytes for states of {state_bytes} each: give at least 0 and at least 1")
    return budget_bytes // state_bytes


def _affordable(positions: set[int], prompt: RecordingPrompt, max_states: int | None) -> list[int]:
    """The last `max_states` of the positions that are not stored yet."""
    found = sorted(position for position in positions if position > prompt.prefix_len)
    return found if max_states is None else found[max(len(found) - max_states, 0) :]
