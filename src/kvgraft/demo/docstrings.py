"""Questions that people ask over passages that people wrote: the standard library's documentation strings.

For models that follow instructions; `documents` has the sources themselves, which the bundled model has been trained to read.
A passage is a function's signature and documentation; its questions are answered by its first sentence or its name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.demo.documents import Question, stdlib_modules

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from kvgraft.demo.documents import Module

_MODULES = frozenset(
    {
        "base64",
        "bisect",
        "difflib",
        "filecmp",
        "fnmatch",
        "glob",
        "heapq",
        "ipaddress",
        "linecache",
        "mimetypes",
        "secrets",
        "shutil",
        "socket",
        "statistics",
        "subprocess",
        "textwrap",
        "traceback",
        "urllib.parse",
        "uuid",
        "warnings",
    }
)
_CHARACTERS = (200, 480)
_LONGEST_SENTENCE = 70
_VERBS = frozenset(
    {
        "Collapse",
        "Compare",
        "Copy",
        "Decode",
        "Encode",
        "Fill",
        "Format",
        "Generate",
        "Get",
        "Guess",
        "Insert",
        "Merge",
        "Print",
        "Recursively",
        "Remove",
        "Represent",
        "Resolve",
        "Return",
        "Take",
        "Test",
        "Unpack",
        "Wrap",
    }
)
"""First words of sentences that go on from 'to'."""

OPENINGS = (
    "Answer my question from these notes, in one sentence.",
    "I have collected some notes about Python. Use them to answer the question below.",
    "You help a beginner with Python's standard library.",
    "Please read the following documentation. There is one question behind it.",
    "These notes were found for a question. Answer it briefly and do not invent anything.",
    "A colleague would like to know something about the functions described here.",
    "Keep your answer short. What you need stands in one of the descriptions.",
    "Below are excerpts of a manual, in no particular order, and then a question about one of them.",
)


@dataclass(frozen=True, slots=True)
class Note:
    """Documentation of one of the library's functions."""

    name: str
    signature: str
    docstring: str

    @property
    def text(self) -> str:
        """The passage as it goes into a prompt."""
        return f"{self.signature}\n{self.docstring}"

    @property
    def sentence(self) -> str:
        """The first sentence of the documentation, without its full stop."""
        return _first_sentence(self.docstring)


@cache
def notes() -> tuple[Note, ...]:
    """Yield every suitable note of the standard library, in order of module and file."""
    modules = stdlib_modules(wanted=_MODULES.__contains__)
    return tuple(note for module in modules for note in _notes_of(module))


def ask_about(note: Note, rng: random.Random) -> Question:
    """Ask what the function does, or which function does it."""
    if rng.random() < 0.5:
        return Question(f"What does {note.name} do?", note.sentence)
    return Question(f"Which function do I call to {note.sentence[0].lower()}{note.sentence[1:]}?", note.name)


def message(opening: str, chosen: Iterable[Note], question: Question) -> str:
    """Join an opening, passages and a question as one message of a user."""
    body = "\n\n".join(note.text for note in chosen)
    return f"{opening}\n\n{body}\n\nQuestion: {question.text}"


def library(size: int, rng: random.Random) -> Sequence[Note]:
    """Draw `size` notes; fewer where the standard library has fewer."""
    found = notes()
    return rng.sample(found, min(size, len(found)))


def _notes_of(module: Module) -> Iterator[Note]:
    shortest, longest = _CHARACTERS
    for node in ast.parse(module.source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        sentence = _first_sentence(docstring)
        suits = len(sentence) <= _LONGEST_SENTENCE and "`" not in sentence and sentence.split(" ")[0] in _VERBS
        if suits and shortest <= len(docstring) <= longest:
            name = f"{module.name}.{node.name}"
            yield Note(name, f"{name}({ast.unparse(node.args)})", docstring)


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n", 1)[0].split())
    return paragraph.split(". ", 1)[0].rstrip(".")
