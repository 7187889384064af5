"""Prompts of conversations: what a user has written in one, or each turn after all that was said before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.bench.datasets.rows import field_of, texts_of, value_at
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.bench.datasets.known import PublicDataset
    from kvgraft.bench.datasets.rows import Row

_USERS = frozenset({"user", "human"})
_ASSISTANT = "Assistant:"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said."""

    is_user: bool
    text: str


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """Parts of a prompt, and what the assistant answered; None if it is not known."""

    parts: tuple[str, ...]
    answer: str | None = None


def conversations(
    dataset: PublicDataset, rows: Iterator[tuple[str, Row]]
) -> Iterator[tuple[str, list[ConversationPrompt]]]:
    """Yield the session and the prompts of every row that has some of enough characters.

    Raises:
        ConfigError: A row has no messages, or they are none.
    """
    for number, (line, row) in enumerate(rows):
        turns = _turns(field_of(row, dataset.fields["messages"], "messages", line), line)
        made = [_joined(turns)] if dataset.joins_turns else list(_each_turn(turns))
        long_enough = [each for each in made if sum(map(len, each.parts)) >= max(1, dataset.min_characters)]
        if long_enough:
            yield _session(dataset, row, number), long_enough


def _session(dataset: PublicDataset, row: Row, number: int) -> str:
    """Return what names the session: its user or itself, else the number of the row."""
    found = [text for path in dataset.fields.get("session", ()) for text in texts_of(value_at(row, path))]
    return found[0] if found else str(number)


def _turns(messages: object, line: str) -> list[Turn]:
    """Read `{"role": ..., "content": ...}`, `{"from": ..., "value": ...}`, or texts, all of them the user's."""
    if not isinstance(messages, list):
        raise ConfigError(f"{line}: the messages are no list; give --messages PATH")
    turns = []
    for message in messages:
        if isinstance(message, dict):
            role, content = (message.get(name, message.get(other)) for name, other in _NAMES)
            if not isinstance(role, str):
                raise ConfigError(f'{line}: a message has neither "role" nor "from"; convert the messages')
            turns += [Turn(role in _USERS, text) for text in texts_of(content)]
        else:
            turns += [Turn(is_user=True, text=text) for text in texts_of(message)]
    return turns


_NAMES = (("role", "from"), ("content", "value"))


def _joined(turns: list[Turn]) -> ConversationPrompt:
    return ConversationPrompt(tuple(turn.text for turn in turns if turn.is_user))


def _each_turn(turns: list[Turn]) -> Iterator[ConversationPrompt]:
    said = tuple(f"{'User' if turn.is_user else 'Assistant'}: {turn.text}" for turn in turns)
    for number, turn in enumerate(turns):
        if turn.is_user:
            following = turns[number + 1] if number + 1 < len(turns) else None
            answer = following.text if following is not None and not following.is_user else None
            yield ConversationPrompt((*said[: number + 1], _ASSISTANT), answer)
