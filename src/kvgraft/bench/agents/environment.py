"""A scripted environment made of the standard library: a code base, an agent that looks through it, and its tools' answers.

What the agent writes is scripted, too, so that every model is asked the same prompts; only the last message is for the
model to answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.demo.documents import passages, stdlib_modules
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import random

    from kvgraft.demo.documents import Passage

_CHARACTERS = (300, 700)
_LEAST_PASSAGES = 100
_STEPS = ("read", "search", "test", "reply")
"""Actions of the agent on each task, in order."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` is `user`, `assistant` or `tool`, `reasoning` comes before the `content`."""

    role: str
    content: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that lies in the context all the time."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class AgentStep:
    """Messages that one turn adds, after which the model is asked, and the answer that it is taken to have given.

    Attributes:
        asked: A user's message or a tool's result.
        answer: The assistant's next message.
        note: A line that says what was done, for summaries.
    """

    asked: Message
    answer: Message
    note: str


@dataclass(frozen=True, slots=True)
class Episode:
    """One session of an agent: schemas of its tools as JSON, the files that it always sees, and its turns."""

    tools: tuple[str, ...]
    files: tuple[SourceFile, ...]
    steps: tuple[AgentStep, ...]


def episode(rng: random.Random, num_turns: int, num_files: int) -> Episode:
    """Draw an episode.

    Args:
        rng: What it is drawn with.
        num_turns: Steps.
        num_files: Files in the context.

    Raises:
        ConfigError: The standard library's sources are not installed, or do not have enough for so much.
    """
    known = list(_passages())
    if num_files + num_turns > len(known):
        raise ConfigError(
            f"{num_turns} turns and {num_files} files of agents are more than the {len(known)} passages of the standard "
            "library; make fewer"
        )
    rng.shuffle(known)
    drawn = known[: num_files + num_turns]
    files = tuple(
        SourceFile(f"src/{passage.name}_{i}.py", passage.source) for i, passage in enumerate(drawn[:num_files])
    )
    steps, asked = [], _task(rng, drawn[num_files])
    for number, passage in enumerate(drawn[num_files:]):
        answer, asked_next, note = _action(rng, _STEPS[number % len(_STEPS)], passage)
        steps.append(AgentStep(asked, answer, note))
        asked = asked_next
    return Episode(_TOOLS, files, tuple(steps))


@cache
def _passages() -> tuple[Passage, ...]:
    modules = stdlib_modules(wanted=lambda name: "test" not in name)
    low, high = _CHARACTERS
    found = tuple(p for module in modules for p in passages(module) if low <= len(p.source) <= high)
    if len(found) < _LEAST_PASSAGES:
        raise ConfigError("the standard library's sources are not installed; install Python with its .py files")
    return found


def _task(rng: random.Random, passage: Passage) -> Message:
    asked = rng.choice(
        (
            "Find out why {name} in {module} is slow for large inputs and propose a change.",
            "Add a parameter to {name} of {module} that keeps the order of the results.",
            "A user reports that {name} ({module}) fails for an empty argument. Look into it.",
            "Explain how {module}.{name} deals with errors, and write a test for it.",
        )
    )
    return Message("user", asked.format(name=passage.name, module=passage.module))


def _action(rng: random.Random, kind: str, passage: Passage) -> tuple[Message, Message, str]:
    """Return the assistant's call and the tool's result, or its reply and the next task; and a note of it."""
    if kind == "reply":
        return _reply(passage), _task(rng, passage), f"replied about {passage.name}"
    path = passage.module.replace(".", "/") + ".py"
    line = rng.randrange(20, 900)
    if kind == "read":
        call = {"name": "read_file", "arguments": {"path": path, "start": line, "end": line + 30}}
        thought = (
            f"The definition of {passage.name} should be in {path}; I read it from line {line} on before I change it."
        )
        result = f"{path}, from line {line}:\n{passage.source}"
        note = f"read {path} at line {line}: {passage.name}"
    elif kind == "search":
        call = {"name": "search", "arguments": {"pattern": passage.name, "path": path}}
        thought = f"Who calls {passage.name}? If nobody outside of {path} does, its signature can change."
        hits = "\n".join(
            f"{path}:{line + 17 * i}: {text.strip()}" for i, text in enumerate(passage.source.splitlines()[:6])
        )
        result = f"{hits}\n{rng.randrange(3, 40)} more matches in other files"
        note = f"searched for {passage.name} in {path}"
    else:
        call = {"name": "run_tests", "arguments": {"select": passage.name, "verbose": False}}
        thought = f"Before I go on, the tests of {passage.name} must pass, and the ones of its module."
        failed = rng.randrange(0, 3)
        result = (
            f"{rng.randrange(12, 90)} passed, {failed} failed in {rng.randrange(1, 30)}.{rng.randrange(10)} s\n"
            + (
                f"FAILED tests/test_{passage.name}.py::test_{passage.name}_{line} - AssertionError"
                if failed
                else "all good"
            )
        )
        note = f"ran the tests of {passage.name}: {failed} failed"
    answer = Message("assistant", "<tool_call>\n" + json.dumps(call) + "\n</tool_call>", thought)
    return answer, Message("tool", result), note


def _reply(passage: Passage) -> Message:
    return Message(
        "assistant",
        f"Done. {passage.name} keeps its signature; the change is small and its tests pass. What I left alone: callers in "
        f"other modules than {passage.module}.",
        f"Everything that was asked about {passage.name} is there; I say so in two sentences.",
    )


def _tool(name: str, description: str, **parameters: str) -> str:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return json.dumps(
        {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
    )


_TOOLS = (
    _tool("read_file", "Read lines of a file of the project.", path="string", start="integer", end="integer"),
    _tool(
        "search", "Search files for a regular expression; gives paths, lines and text.", pattern="string", path="string"
    ),
    _tool("run_tests", "Run tests whose name contains a word; gives a summary and failures.", select="string"),
    _tool(
        "edit_file", "Replace text in a file; the old text must occur once.", path="string", old="string", new="string"
    ),
    _tool("list_files", "List the files of a folder, newest first, with their sizes.", path="string"),
    _tool(
        "shell", "Run a command in the project's folder; gives its output, cut at 4,000 characters.", command="string"
    ),
)
