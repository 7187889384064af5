"""Public data sets: the fields in which each has its texts, and the shape of requests made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CONVERSATION = "conversation"
"""Turns of users and assistants, session by session."""
DOCUMENT = "document"
"""An instruction and a document."""
QUESTION = "question"
"""An instruction, a document and a question about it."""

_ASKINGS = 4
"""Wordings in which SemBlend's cross-instruction benchmark asks for the same document."""


@dataclass(frozen=True, slots=True)
class PublicDataset:
    """How rows of a data set become requests.

    Attributes:
        title: Its own name, and where it is published.
        shape: `CONVERSATION`, `DOCUMENT` or `QUESTION`.
        fields: Paths (`rows.value_at`) of `messages`, `session`, `document`, `question` and `answers`, those that it has; the
            first at which a row has a text counts, as files of one data set differ by where they come from.
        askings: Requests per document, or per question about it, each after the next of the instructions.
        joins_turns: Whether a conversation is one prompt, its user's turns, as SemBlend asks WildChat; else each turn of its
            user is one, after all that was said before it.
        min_characters: Shorter prompts are left out.
        separator: Stands between the passages of a document; empty if it is one.
        first_line: Pattern of the row with which a document begins, where a row is a line; empty if a row is a document.
        last_line_asks: Whether the last line of a document is the question, which then has no field of its own.
    """

    title: str
    shape: str
    fields: Mapping[str, tuple[str, ...]]
    askings: int = 1
    joins_turns: bool = False
    min_characters: int = 0
    separator: str = ""
    first_line: str = ""
    last_line_asks: bool = False


def _articles(
    title: str, document: str, answers: str = "", *, separator: str = "", first_line: str = ""
) -> PublicDataset:
    fields = {"document": (document,)} | ({"answers": (answers,)} if answers else {})
    return PublicDataset(title, DOCUMENT, fields, _ASKINGS, separator=separator, first_line=first_line)


DATASETS: dict[str, PublicDataset] = {
    "wildchat": PublicDataset(
        "WildChat (allenai/WildChat-1M)",
        CONVERSATION,
        {"messages": ("conversation", "user_texts"), "session": ("hashed_ip",)},
        joins_turns=True,
        min_characters=4_000,
    ),
    "cnn_dailymail": _articles("CNN/DailyMail (abisee/cnn_dailymail)", "article", "highlights"),
    "multi_news": _articles("MultiNews (alexfabbri/multi_news)", "document", "summary", separator="|||||"),
    "samsum": _articles("SAMSum (knkarthick/samsum)", "dialogue", "summary"),
    "wikitext-103": _articles("WikiText-103 (Salesforce/wikitext)", "text", first_line=r"\s*= (?!=).*[^=] =\s*"),
    "longeval": PublicDataset(
        "LongEval lines (DachengLi1/LongChat)",
        QUESTION,
        {"document": ("prompt",), "answers": ("expected_number",)},
        3,
        last_line_asks=True,
    ),
    "narrativeqa": PublicDataset(
        "NarrativeQA (deepmind/narrativeqa)",
        QUESTION,
        {
            "document": ("document.summary.text", "summary", "document.text"),
            "question": ("question.text", "question"),
            "answers": ("answers.text", "answers"),
        },
    ),
    "triviaqa": PublicDataset(
        "TriviaQA (mandarjoshi/trivia_qa, rc)",
        QUESTION,
        {
            "document": ("entity_pages.wiki_context", "search_results.search_context", "context"),
            "question": ("question",),
            "answers": ("answer.aliases", "answer.value", "answers"),
        },
    ),
    "scbench": PublicDataset(
        "SCBench (microsoft/SCBench)",
        QUESTION,
        {
            "document": ("context", "input"),
            "question": ("multi_turns.input", "question"),
            "answers": ("multi_turns.answer", "answer"),
        },
    ),
    "loogle": PublicDataset(
        "LooGLE (bigai-nlco/LooGLE)",
        QUESTION,
        {
            "document": ("context", "input"),
            "question": ("question", "qa_pairs.Q"),
            "answers": ("answer", "qa_pairs.A"),
        },
    ),
    CONVERSATION: PublicDataset(
        "any conversations",
        CONVERSATION,
        {"messages": ("messages", "conversation", "conversations"), "session": ("session_id", "user", "id")},
    ),
    DOCUMENT: PublicDataset(
        "any documents", DOCUMENT, {"document": ("document", "text"), "answers": ("summary", "answers")}, _ASKINGS
    ),
    QUESTION: PublicDataset(
        "any questions over documents",
        QUESTION,
        {"document": ("document", "context"), "question": ("question",), "answers": ("answers", "answer")},
    ),
}
"""By the name that `kvgraft bench pack dataset` takes; the last three are for files of none of the others."""
