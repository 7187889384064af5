"""Real documents that every machine with Python has: the standard library's own sources.

Gives modules, the passages (functions and classes) inside them and questions with their answer in the passage.
The demo builds its sessions from it and `models/train.py` its corpus; the split into training and held-out modules
is decided here so that both agree. It knows nothing about models or tokens.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator

HELD_OUT = frozenset(
    {
        "argparse",
        "contextlib",
        "datetime",
        "heapq",
        "http",
        "pickle",
        "statistics",
        "subprocess",
        "tempfile",
        "textwrap",
    }
)
"""Parts of the names of modules (and of their tests) that the bundled model has never seen in training."""

_GENERATED = frozenset({"site-packages", "lib2to3", "distutils", "idlelib", "turtledemo", "__pycache__", "ensurepip"})
_MAX_FILE_CHARACTERS = 400_000
_PASSAGE_CHARACTERS = (300, 2_400)

INSTRUCTIONS = (
    "Read the passages and answer the question that follows them.",
    "You are a careful reviewer. Use only the code below.",
    "Below is code from the Python standard library. Answer briefly.",
    "Study these definitions, then reply with the exact text that is asked for.",
    "You help a newcomer to find things in a code base. Quote, do not invent.",
    "The passages come from several modules in no particular order.",
    "Answer from the sources below and say nothing else.",
    "A colleague pasted these functions and has one question about them.",
    "Here is some context that was retrieved for you. Not all of it is needed.",
    "Find the passage that answers the question and copy the relevant line.",
    "Work through the documents one by one before you answer.",
    "Documents first, question last. Be exact.",
)


def is_held_out(module: str) -> bool:
    """Return whether the module of this dotted name is kept out of training."""
    return any(name in module for name in HELD_OUT)


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the standard library: dotted `name` and its text."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A function or class as it stands in its module."""

    module: str
    name: str
    source: str
    docstring: str

    @property
    def text(self) -> str:
        """The passage as it goes into a prompt, with a heading that names its origin."""
        return f"### {self.module}.{self.name}\n{self.source}"

    @property
    def first_line(self) -> str:
        """The line that defines it."""
        return next(line for line in self.source.splitlines() if line.startswith(("def ", "class ", "async ")))


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one passage and the answer that can be read there."""

    text: str
    answer: str


def stdlib_modules(root: Path | None = None, *, wanted: Callable[[str], bool] = lambda _: True) -> list[Module]:
    """Read the standard library's `.py` files below `root`, sorted by name; unreadable files are left out.

    Args:
        root: Default: where this Python has it.
        wanted: Whether to read the module of this dotted name.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _GENERATED.intersection(parts) or (parts[0] == "encodings" and parts[-1][-1].isdigit()):
            continue
        if not wanted(".".join(parts)):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 200 < len(source) <= _MAX_FILE_CHARACTERS:
            modules.append(Module(".".join(parts), source))
    return modules


def passages(module: Module) -> Iterator[Passage]:
    """Yield the top-level functions and classes of `module` of a length that suits a prompt, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(module.source)
    except (SyntaxError, ValueError):
        return
    lines = module.source.splitlines()
    shortest, longest = _PASSAGE_CHARACTERS
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if shortest <= len(source) <= longest:
            yield Passage(module.name, node.name, source, ast.get_docstring(node) or "")


def ask(passage: Passage, rng: random.Random) -> Question:
    """Ask one of three things about `passage`: its defining line, its module, or what its docstring says."""
    kinds = ["line", "module"] + (["docstring"] if passage.docstring else [])
    kind = rng.choice(kinds)
    if kind == "line":
        return Question(f"Which line defines `{passage.name}`?", passage.first_line)
    if kind == "module":
        return Question(f"Which module holds `{passage.name}`?", f"{passage.module}.{passage.name}")
    return Question(f"What does the docstring of `{passage.name}` say?", passage.docstring.splitlines()[0])


def prompt(instruction: str, documents: Iterable[Passage], question: Question) -> str:
    """Join an instruction, passages and a question the way a RAG application does."""
    body = "\n\n".join(passage.text for passage in documents)
    return f"{instruction}\n\n{body}\n\nQuestion: {question.text}\nAnswer:"
