"""Turn generated ids into text as they come, and watch for stop texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OutputText:
    """The text of one request. Without a tokenizer it stays empty and nothing stops it.

    Text that could still become part of a stop text is held back until the next tokens decide.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: tuple[str, ...]) -> None:
        self.stopped = False
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._holdback = max((len(text) for text in stop), default=1) - 1
        self._text = ""
        self._sent = 0

    @property
    def text(self) -> str:
        """All text so far, cut before a stop text."""
        return self._text

    def push(self, token_id: int) -> str:
        """Add a token; returns text that is certain now (it may be none: characters can span tokens)."""
        if self._backend is None or self.stopped:
            return ""
        self._text += self._stream.step(self._backend, token_id) or ""
        found = [
            at for at in (self._text.find(text, max(0, self._sent - self._holdback)) for text in self._stop) if at >= 0
        ]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]
            return self.flush()
        return self._release(len(self._text) - self._holdback)

    def flush(self) -> str:
        """Return what was held back; nothing more will come."""
        return self._release(len(self._text))

    def _release(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start : self._sent]
