"""Turn generated ids into text as they come, and watch for stop texts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvgraft.engine.sampling.sampling_params import SamplingParams

_BROKEN = "\ufffd"
"""Written by decoders for bytes that are no character, or not yet."""


class OutputText:
    """The text of one request. Without a tokenizer it stays empty and nothing stops it.

    What comes out in pieces is in the end what the tokenizer decodes all ids to, cut at a stop text. Held back is
    text that could still become part of a stop text, or that further tokens could change: the bytes of an incomplete
    character, and a run of byte tokens, which decodes as a whole. A window of the ids is decoded at a time, from the last
    certain piece on, because the text of a token depends on what is before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: tuple[str, ...],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Begin without text.

        Args:
            tokenizer: Of the model, or None.
            stop: Texts that end it.
            include_stop: Cut after the stop text instead of before it.
            skip_special_tokens: Leave out special tokens.
            min_tokens: Stop texts that are complete with so many tokens do not count.
        """
        self.stopped = False
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._num_unwatched = min_tokens
        self._unwatched_len = 0
        self._holdback = max((len(text) for text in stop), default=1) - 1
        self._text = ""
        self._sent = 0
        self._known: list[int] = []
        self._pending: list[int] = []
        self._known_text = ""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None, sampling: SamplingParams) -> OutputText:
        """The text of a request."""
        return cls(
            tokenizer,
            sampling.stop,
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )

    def fork(self) -> OutputText:
        """A copy that goes its own way."""
        other = copy.copy(self)
        other._known, other._pending = self._known.copy(), self._pending.copy()
        return other

    @property
    def text(self) -> str:
        """All certain text so far, cut at a stop text."""
        return self._text

    def push(self, token_id: int) -> str:
        """Add a token; returns text that is certain now (it may be none: characters can span tokens)."""
        if self._backend is None or self.stopped:
            return ""
        self._pending.append(token_id)
        self._num_unwatched -= 1
        decoded = self._decoded()
        if len(decoded) <= len(self._known_text) or decoded.endswith(_BROKEN) or self._is_byte(token_id):
            return ""
        added = decoded[len(self._known_text) :]
        self._known, self._pending = self._pending, []
        self._known_text = self._decoded()
        return self._append(added)

    def flush(self) -> str:
        """Return what was held back; nothing more will come."""
        added = ""
        if self._pending and not self.stopped:
            added = self._append(self._decoded()[len(self._known_text) :])
            self._pending = []
        return added + self._release(len(self._text))

    def _decoded(self) -> str:
        """Return the text of the last certain ids and of those after them."""
        assert self._backend is not None
        text: str = self._backend.decode(self._known + self._pending, skip_special_tokens=self._skip_special_tokens)
        return text

    def _is_byte(self, token_id: int) -> bool:
        """Return whether the token stands for one byte (`<0x0A>`), whose text the next byte can change."""
        assert self._backend is not None
        token: str = self._backend.id_to_token(token_id) or ""
        return len(token) == len("<0x0A>") and token.startswith("<0x")

    def _append(self, added: str) -> str:
        self._text += added
        if self._num_unwatched >= 0:
            self._unwatched_len = len(self._text)
        found = [(at, len(text)) for text in self._stop if (at := self._find(text)) >= 0]
        if found:
            self.stopped = True
            at, length = min(found)
            self._text = self._text[: at + length if self._include_stop else at]
            return self._release(len(self._text))
        return self._release(len(self._text) - self._holdback)

    def _find(self, stop: str) -> int:
        """Return where a stop text begins that is not out yet and ends after what is not watched; -1 if there is none."""
        return self._text.find(stop, max(0, self._sent - self._holdback, self._unwatched_len - len(stop) + 1))

    def _release(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start : self._sent]
