"""A RAG session over real documents: every request is a new instruction, several documents in a new order, and a question."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.demo.documents import INSTRUCTIONS, Passage, ask, is_held_out, passages, prompt, stdlib_modules
from kvgraft.demo.handbook import OPENINGS, QUESTIONS, message, pages
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIBRARY_PASSAGES = 24
_MIN_PASSAGE_CHARACTERS = 900
_NO_SOURCES = "the standard library's sources are not installed; install Python with its .py files"


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One prompt of the session, the question in it and the text that a right answer has in it."""

    prompt: str
    question: str
    answer: str


def rag_session(num_requests: int, documents_per_request: int, seed: int) -> list[SessionRequest]:
    """Build a session from modules that the bundled model has not been trained on."""
    rng = random.Random(seed)
    library = _library(rng)
    requests = []
    for number in range(num_requests):
        documents = rng.sample(library, documents_per_request)
        question = ask(rng.choice(documents), rng)
        instruction = f"Request {number + 1}. {rng.choice(INSTRUCTIONS)}"
        requests.append(SessionRequest(prompt(instruction, documents, question), question.text, question.answer))
    return requests


def chat_session(num_requests: int, documents_per_request: int, seed: int) -> list[SessionRequest]:
    """Build a session of guests' questions over a handbook; a prompt is one message to a model that takes instructions.

    The page with the answer comes last, where a search puts its best match; the others lie in any order.
    """
    titles = sorted(pages())
    requests = []
    for number in range(num_requests):
        question = QUESTIONS[number % len(QUESTIONS)]
        rng = random.Random(f"{seed} {question.text}")
        others = [title for title in titles if title != question.page]
        chosen = [*rng.sample(others, min(documents_per_request, len(titles)) - 1), question.page]
        text = message(rng.choice(OPENINGS), chosen, question)
        requests.append(SessionRequest(text, question.text, question.answer))
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
