"""Places of tokens in the text that they were made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.literal_text import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""First character, and the one after the last."""


def token_spans(
    tokenizer: PreTrainedTokenizerBase | None, text: str, *, add_special_tokens: bool = True
) -> list[Span] | None:
    """Return the characters that each token of `text` stands for; None where the tokenizer does not say.

    Spans begin where those before them end, except that tokens of one character have all of it. The blank that a token
    begins with is part of it. Tokens that stand for no text have empty spans.

    Complexity: that of tokenising.
    """
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return None
    given = encode(tokenizer, text, add_special_tokens=add_special_tokens, with_offsets=True).offsets
    spans, end = [], 0
    for start, stop in given or ():
        if stop > start:
            # Some tokenizers trim the blank: what lies between two tokens is the later one's.
            spans.append((min(int(start), end), int(stop)))
            end = max(end, int(stop))
        else:
            spans.append((end, end))
    return spans
