"""Where tokens lie in the text that they were made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""First character, and the one behind the last."""


def token_spans(
    tokenizer: PreTrainedTokenizerBase | None, text: str, *, add_special_tokens: bool = True
) -> list[Span] | None:
    """Return the characters that each token of `text` stands for; None where the tokenizer cannot tell.

    Spans begin where those in front of them end, except that tokens of one character have all of it. The blank that a token
    begins with is part of it. Tokens that stand for no text have empty spans.

    Complexity: that of tokenising.
    """
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return None
    given: list[Span] = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    spans, end = [], 0
    for start, stop in given:
        if stop > start:
            # Some tokenizers trim the blank: what lies between two tokens is the later one's.
            spans.append((min(int(start), end), int(stop)))
            end = max(end, int(stop))
        else:
            spans.append((end, end))
    return spans
