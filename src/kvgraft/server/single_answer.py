"""Answers of one choice that are read as texts and calls of tools, and end without a mark: responses and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.server.answer import AnswerWriter
from kvgraft.server.tools import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.engine.requests.request import StreamPart
    from kvgraft.server.answer import AnswerForm, JSONObject
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.logprobs import TokenTexts
    from kvgraft.server.options import AnswerOptions
    from kvgraft.server.tools import OutputReader, Piece


class SingleAnswerWriter(AnswerWriter):
    """Reads the parts of one choice. Subclasses say what they make of the pieces."""

    end = b""

    def __init__(
        self,
        head: JSONObject,
        form: AnswerForm,
        choices: Sequence[ChoiceRequest],
        texts: TokenTexts,
        options: AnswerOptions,
        *,
        reader: OutputReader | None,
    ) -> None:
        """Begin an answer.

        Args:
            head: Its id, when it was asked for, and the model.
            form: Of the prefix of its id.
            choices: The one choice that it has.
            texts: Of tokens.
            options: What the client asked for.
            reader: Finds calls of tools; None if there are no tools.
        """
        super().__init__(head, form, choices, texts, options)
        self._reader = reader

    def _read(self, part: StreamPart) -> Iterable[Piece]:
        """Note a part; returns the texts and calls in it."""
        self._states[0].note(part)
        text = self._text_of(part)
        if self._reader is None:
            return [Content(text)] if text else []
        return self._reader.feed(text) + (self._reader.finish() if part.output else [])

    def _text_of(self, part: StreamPart) -> str:
        return part.text
