"""Names of documents in a body: `kvgraft.documents`, and `kvgraft.document` of text parts of messages."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvgraft.engine.requests.document_names import MAX_NAME_CHARS, DocumentLabel
from kvgraft.engine.requests.donor_names import MAX_LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgraft.http.fields import Fields

_MAX_DOCUMENTS = 256
_KEYS = frozenset({"id", "text", "range"})
_PART_KEYS = frozenset({"document"})
_NUM_BOUNDS = 2
_CUT = "truncate_prompt_tokens, which may cut named parts off; leave out one of them"


def prompt_documents(fields: Fields, prompts: Sequence[str | list[int]]) -> tuple[DocumentLabel, ...]:
    """Return the labels of the prompt of a completion. Looks through it; call it off the event loop.

    Raises:
        APIError: One of them is wrong, or there are several prompts.
    """
    given = _given(fields)
    if given and (len(prompts) != 1 or fields.has("session_id")):
        raise fields.section("kvgraft").error("documents", "go with one prompt and without session_id")
    return tuple(_all_labels(given, prompts[0], "give a range, or a longer text"))


def chat_documents(fields: Fields, prompt: str) -> tuple[DocumentLabel, ...]:
    """Return the labels of a conversation, found in the text that the chat template made of it; off the event loop, too.

    Raises:
        APIError: One of them is wrong, or its text is not in the rendered conversation.
    """
    given = _given(fields)
    for document in given:
        if document.has("range"):
            raise document.error("range", "counts characters of a rendered conversation; give the text instead")
    found = _all_labels(given, prompt, "give a longer text, or name a text part of a message")
    after = 0
    for part in _named_parts(fields):
        if fields.has("truncate_prompt_tokens"):
            raise part.error("kvgraft", f"does not go with {_CUT}")
        if len(found) == MAX_LABELS:
            raise part.error("kvgraft", f"is one name too many; a prompt has at most {MAX_LABELS} named places")
        name, text = part.section("kvgraft", known=_PART_KEYS).text("document"), part.text("text").strip()
        start = prompt.find(text, after)
        start = prompt.find(text) if start < 0 else start
        if not text or start < 0 or not 0 < len(name) <= MAX_NAME_CHARS:
            raise part.error(
                "kvgraft",
                f"needs a document of 1 to {MAX_NAME_CHARS} characters, and a text that the chat template keeps",
            )
        after = start + len(text)
        found.append(DocumentLabel(name, start, after))
    return tuple(found)


def _given(fields: Fields) -> list[Fields]:
    """Objects of `kvgraft.documents`, each with an id and one of text and range."""
    ours = fields.section("kvgraft")
    given = ours.sections("documents")
    if given and fields.has("truncate_prompt_tokens"):
        raise ours.error("documents", f"do not go with {_CUT}")
    if len(given) > _MAX_DOCUMENTS:
        raise ours.error("documents", f"must have at most {_MAX_DOCUMENTS} items")
    for document in given:
        document.check_keys(_KEYS)
        if not document.text("id", max_chars=MAX_NAME_CHARS):
            raise document.error("id", "is missing; give the name of the document")
        if document.has("text") == document.has("range"):
            raise document.error("text", "or range must be there, and not both")
    return given


def _all_labels(given: Sequence[Fields], prompt: str | list[int], remedy: str) -> list[DocumentLabel]:
    """Labels of all documents; no more places are looked for than may have names."""
    found: list[DocumentLabel] = []
    for document in given:
        found += islice(_labels(document, prompt), MAX_LABELS - len(found) + 1)
        if len(found) > MAX_LABELS:
            key = "range" if document.has("range") else "text"
            raise document.error(key, f"names place {MAX_LABELS + 1} of the prompt, one too many; {remedy}")
    return found


def _labels(document: Fields, prompt: str | list[int]) -> Iterator[DocumentLabel]:
    """Labels of a document: one for its range, or one for every place of its text."""
    name = document.text("id")
    if document.has("range"):
        bounds = document.token_ids("range", max_items=_NUM_BOUNDS)
        if len(bounds) != _NUM_BOUNDS or not bounds[0] < bounds[1] <= len(prompt):
            unit = "characters" if isinstance(prompt, str) else "token ids"
            raise document.error(
                "range", f"must be [start, end] of the prompt's {len(prompt)} {unit}, the end after the last"
            )
        yield DocumentLabel(name, *bounds)
        return
    text = document.text("text")
    if not isinstance(prompt, str):
        raise document.error("text", "cannot be found in token ids; give a range")
    if not text or text not in prompt:
        raise document.error("text", "does not stand in the prompt as it is")
    for start in _places(prompt, text):
        yield DocumentLabel(name, start, start + len(text))


def _places(prompt: str, text: str) -> Iterator[int]:
    """Yield where a text stands; places do not overlap."""
    start = prompt.find(text)
    while start >= 0:
        yield start
        start = prompt.find(text, start + len(text))


def _named_parts(fields: Fields) -> Iterator[Fields]:
    for key in ("messages", "input"):
        for message in fields.sections(key) if isinstance(fields.values.get(key), list) else ():
            if isinstance(message.values.get("content"), list):
                yield from (part for part in message.sections("content") if part.has("kvgraft"))
