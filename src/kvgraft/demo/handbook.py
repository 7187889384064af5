"""Questions of guests over the pages of a handbook (`handbook.md`) that was written for the demo: no real place.

For models that follow instructions; `documents` has sources, which the bundled model has been trained to read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

OPENINGS = (
    "These are pages of the handbook of a research station. Answer the question at the end from them.",
    "You help guests of a research station. The pages below were found for a question.",
    "Please read these pages of a handbook. There is one question behind them.",
    "A guest of a research station would like to know something. Answer briefly and do not invent anything.",
    "Below are pages of a handbook, the one that fits best last, and then a question.",
    "Keep your answer short. What you need stands on one of these pages.",
)


@dataclass(frozen=True, slots=True)
class GuestQuestion:
    """A question about the page with the title `page`; a right answer has the text `answer` in it."""

    page: str
    text: str
    answer: str


QUESTIONS = (
    GuestQuestion("Arrival", "How long does the crossing take?", "two hours"),
    GuestQuestion("Meals", "What is the name of the cook?", "Henrik"),
    GuestQuestion("Laboratory", "Who is the head of the laboratory?", "Diallo"),
    GuestQuestion("Radio and internet", "What is the name of the wireless network?", "SealBayGuest"),
    GuestQuestion("Electricity", "How many litres an hour does the generator burn?", "four"),
    GuestQuestion("Boats", "What is the largest boat called?", "Petrel"),
    GuestQuestion("Arrival", "Where is the assembly point?", "red bench"),
    GuestQuestion("Radio and internet", "On which channel does the station listen?", "16"),
    GuestQuestion("Electricity", "Where is the washing machine?", "cellar"),
    GuestQuestion("Radio and internet", "Who is the technician for radios and computers?", "Tanaka"),
)
"""Chosen: SmolLM2-135M-Instruct answers them rightly in the demo's default prompts when nothing is reused."""


@cache
def pages() -> dict[str, str]:
    """Return the text of each page, by its title."""
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return {page.split("\n", 1)[0].removeprefix("# "): page.strip() for page in re.split(r"\n(?=# )", text)}


def message(opening: str, titles: Iterable[str], question: GuestQuestion) -> str:
    """Join an opening, pages and a question as one message of a user."""
    known = pages()
    body = "\n\n".join(known[title] for title in titles)
    return f"{opening}\n\n{body}\n\nQuestion: {question.text}"
