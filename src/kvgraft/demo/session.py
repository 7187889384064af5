"""A RAG session over real documents: every request is a new instruction, several documents in a new order, and a question."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.demo.docstrings import OPENINGS, ask_about, library, message
from kvgraft.demo.documents import INSTRUCTIONS, Passage, ask, is_held_out, passages, prompt, stdlib_modules
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIBRARY_PASSAGES = 24
_LIBRARY_NOTES = 12
_MIN_PASSAGE_CHARACTERS = 900
_NO_SOURCES = "the standard library's sources are not installed; install Python with its .py files"


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One prompt of the session, the question in it and what a reader would answer."""

    prompt: str
    answer: str
    question: str = ""


def rag_session(num_requests: int, documents_per_request: int, seed: int) -> list[SessionRequest]:
    """Build a session from modules that the bundled model has not been trained on."""
    rng = random.Random(seed)
    library = _library(rng)
    requests = []
    for number in range(num_requests):
        documents = rng.sample(library, documents_per_request)
        question = ask(rng.choice(documents), rng)
        instruction = f"Request {number + 1}. {rng.choice(INSTRUCTIONS)}"
        requests.append(SessionRequest(prompt(instruction, documents, question), question.answer, question.text))
    return requests


def chat_session(num_requests: int, documents_per_request: int, seed: int) -> list[SessionRequest]:
    """Build a session of questions over documentation; a prompt is one message to a model that takes instructions."""
    rng = random.Random(seed)
    known = library(_LIBRARY_NOTES, rng)
    if len(known) < _LIBRARY_NOTES:
        raise ConfigError(_NO_SOURCES)
    requests = []
    for _ in range(num_requests):
        chosen = rng.sample(known, min(documents_per_request, len(known)))
        question = ask_about(rng.choice(chosen), rng)
        requests.append(SessionRequest(message(rng.choice(OPENINGS), chosen, question), question.answer, question.text))
    return requests


@cache
def _long_passages() -> tuple[Passage, ...]:
    modules = stdlib_modules(wanted=lambda name: is_held_out(name) and not name.startswith("test"))
    return tuple(p for m in modules for p in passages(m) if len(p.source) >= _MIN_PASSAGE_CHARACTERS)


def _library(rng: random.Random) -> Sequence[Passage]:
    long_enough = _long_passages()
    if len(long_enough) < _LIBRARY_PASSAGES:
        raise ConfigError(_NO_SOURCES)
    return rng.sample(long_enough, _LIBRARY_PASSAGES)
