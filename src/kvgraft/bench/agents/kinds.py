"""Kinds of agents, by how their prompts change from turn to turn; each breaks an exact prefix in its own way.

Why these: they are what users of prefix caches report most (volatile text in front, compaction, stripped reasoning, tools in
another order, sub-agents, changed files, other system prompts).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvgraft.bench.agents.environment import Episode, Message, SourceFile, episode
from kvgraft.errors import ConfigError

_ROLES = (
    "You are a coding agent. You look before you change anything, make small changes and run the tests.",
    "You are a careful reviewer of code. You read what others have changed and say what is wrong with it.",
    "You write tests. For every behaviour you find one test that fails without it.",
    "You plan work for a team. You split what is asked into steps that one person can do in an hour.",
)
_SUMMARY_TURNS, _KEPT_STEPS = 8, 3
_SWITCH_TURNS = 5


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Numbers of turns, sessions and files, and their length.

    Attributes:
        turns: Turns of a session, each a prompt, as far as they fit.
        sessions: Sessions, which take turns.
        files: Files in every context.
        max_characters: Where a session ends early, because its next prompt would be longer; about 3 make a token.
        seed: Of all that is drawn.

    Raises:
        ConfigError: A number is out of range.
    """

    turns: int = 40
    sessions: int = 1
    files: int = 4
    max_characters: int = 24_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("turns", 2), ("sessions", 1), ("files", 1), ("max_characters", 1_000)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} of agents must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class AgentPrompt:
    """A prompt of an agent in ChatML, which most open models read; the assistant speaks next. Turns count from 0."""

    text: str
    session: int
    turn: int


@dataclass(frozen=True, slots=True)
class _View:
    """The part of an episode that a turn shows."""

    system: str
    tools: tuple[str, ...]
    files: tuple[SourceFile, ...]
    messages: tuple[Message, ...]

    def text(self) -> str:
        listed = "\n".join(self.tools)
        files = "\n".join(f'<file name="{file.name}">\n{file.text}\n</file>' for file in self.files)
        parts = [_spoken("system", f"{self.system}\n\n# Tools\n{listed}\n\n# Files\n{files}")]
        parts += [_spoken(message.role, _content(message)) for message in self.messages]
        return "".join(parts) + "<|im_start|>assistant\n"


_Show = Callable[[Episode, int, random.Random], _View]


def agent_prompts(kind: str, settings: AgentSettings) -> list[AgentPrompt]:
    """Return the prompts of all sessions in order of arrival, their turns one after the other.

    Raises:
        ConfigError: There is no such kind, or the standard library's sources are not installed.
    """
    if kind not in AGENT_KINDS:
        raise ConfigError(f"unknown kind of agents {kind!r}; choose {', '.join(AGENT_KINDS)}")
    sessions = [_session(AGENT_KINDS[kind], number, settings) for number in range(settings.sessions)]
    return [prompt for turn in range(settings.turns) for prompts in sessions for prompt in prompts[turn : turn + 1]]


def _session(show: _Show, number: int, settings: AgentSettings) -> list[AgentPrompt]:
    name = f"{settings.seed} {number}"
    drawn = episode(random.Random(name), settings.turns, settings.files)
    rng = random.Random(f"{name} shown")  # of its own, so that more turns leave those in front as they are
    prompts = []
    for turn in range(settings.turns):
        text = show(drawn, turn, rng).text()
        if len(text) > settings.max_characters:
            break
        prompts.append(AgentPrompt(text, number, turn))
    if len(prompts) < 2:
        raise ConfigError(
            f"prompts of agents do not fit into {settings.max_characters} characters; raise --max-characters"
        )
    return prompts


def _history(drawn: Episode, turn: int) -> list[Message]:
    """Return all messages up to the one that turn `turn` is asked with; without reasoning, which only `stripped` has."""
    said = [message for step in drawn.steps[:turn] for message in (step.asked, _plain(step.answer))]
    return [*said, drawn.steps[turn].asked]


def _plain(message: Message) -> Message:
    return Message(message.role, message.content)


def _usual(drawn: Episode, turn: int, role: str = _ROLES[0]) -> _View:
    return _View(role, drawn.tools, drawn.files, tuple(_history(drawn, turn)))


def _growing(drawn: Episode, turn: int, _: random.Random) -> _View:
    """Change nothing, so that an exact prefix finds everything; the others are compared with this."""
    return _usual(drawn, turn)


def _clock(drawn: Episode, turn: int, rng: random.Random) -> _View:
    """Change a first line with the time and the use of memory; all else goes on."""
    minute = 9 * 60 + 2 * turn
    state = f"It is {minute // 60:02}:{minute % 60:02} on Monday, 2026-11-23. Memory: {rng.randrange(20, 95)} % in use."
    return _usual(drawn, turn, f"{state}\n{_ROLES[0]}")


def _compaction(drawn: Episode, turn: int, _: random.Random) -> _View:
    """Replace all but the last steps by a summary, from time to time."""
    begin = max(0, turn // _SUMMARY_TURNS * _SUMMARY_TURNS - _KEPT_STEPS)
    messages = [message for step in drawn.steps[begin:turn] for message in (step.asked, _plain(step.answer))]
    if begin:
        notes = "\n".join(f"- {step.note}" for step in drawn.steps[:begin])
        messages.insert(0, Message("user", f"Summary of what was done so far:\n{notes}"))
    return _View(_ROLES[0], drawn.tools, drawn.files, (*messages, drawn.steps[turn].asked))


def _stripped(drawn: Episode, turn: int, _: random.Random) -> _View:
    """Keep reasoning until a user speaks again; then the template leaves out that of all turns before."""
    steps = drawn.steps[: turn + 1]
    last_task = max(index for index, step in enumerate(steps) if step.asked.role == "user")
    messages = []
    for index, step in enumerate(steps[:-1]):
        messages += [step.asked, step.answer if index >= last_task else _plain(step.answer)]
    return _View(_ROLES[0], drawn.tools, drawn.files, (*messages, steps[-1].asked))


def _reorder(drawn: Episode, turn: int, rng: random.Random) -> _View:
    """Put tools and files in another order every time, as from a set or a folder that was listed anew."""
    view = _usual(drawn, turn)
    tools = tuple(rng.sample(view.tools, len(view.tools)))
    return _View(view.system, tools, tuple(rng.sample(view.files, len(view.files))), view.messages)


def _subagents(drawn: Episode, turn: int, _: random.Random) -> _View:
    """Give each turn to another agent, with its own system prompt and tools, the same files, and its own last steps."""
    number = turn % len(_ROLES)
    own = range(max(number, turn - 2 * len(_ROLES)), turn, len(_ROLES))
    said = [m for index in own for m in (drawn.steps[index].asked, _plain(drawn.steps[index].answer))]
    return _View(_ROLES[number], drawn.tools[number:], drawn.files, (*said, drawn.steps[turn].asked))


def _edit(drawn: Episode, turn: int, _: random.Random) -> _View:
    """Change a line in the middle of one of the files before every turn but the first."""
    view = _usual(drawn, turn)
    return _View(
        view.system, view.tools, tuple(_edited(file, i, turn) for i, file in enumerate(view.files)), view.messages
    )


def _edited(file: SourceFile, number: int, turn: int) -> SourceFile:
    """Return the file after the changes of all its turns so far."""
    changes = sum(1 for step in range(1, turn + 1) if step % 3 == number % 3)
    if not changes:
        return file
    lines = file.text.splitlines()
    middle = len(lines) // 2
    return SourceFile(file.name, "\n".join([*lines[:middle], f"    # revision {changes}", *lines[middle:]]))


def _switch(drawn: Episode, turn: int, _: random.Random) -> _View:
    """Exchange the system prompt every few turns; tools, files and conversation go on."""
    return _usual(drawn, turn, _ROLES[turn // _SWITCH_TURNS % len(_ROLES)])


def _spoken(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _content(message: Message) -> str:
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}" if message.reasoning else message.content


AGENT_KINDS: dict[str, _Show] = {
    "growing": _growing,
    "clock": _clock,
    "compaction": _compaction,
    "stripped": _stripped,
    "reorder": _reorder,
    "subagents": _subagents,
    "edit": _edit,
    "switch": _switch,
}
"""Kinds of agents by name."""
