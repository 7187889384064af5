"""Keep long texts from holding up short ones: how few tokens a text can have, and the threads that tokenise."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LONG_TEXT = 1 << 16
"""Characters from which a text takes tens of milliseconds."""
_SHORT_THREADS = 2
_BLANKS = (" ", "\n", "\t")
_UNKNOWN = "\U00100000"
"""For private use: in no vocabulary."""
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TextBound:
    """How few tokens a text can have, by its length: a token stands for no more characters than the longest one has.

    Attributes:
        longest_token: Characters of the longest token; infinite where tokens may stand for any number.
        counts_blanks: Each blank counts; some tokenizers leave blanks out, or take any number of them into a special token.
    """

    longest_token: float = math.inf
    counts_blanks: bool = True

    @staticmethod
    def of(tokenizer: Any) -> TextBound:  # noqa: ANN401 - transformers' tokenizer, or None
        """Return the bound that holds for what `tokenizer` makes of texts; one that is never reached if none is known."""
        try:
            longest = max(map(len, tokenizer.get_vocab()))
            if not _counts(tokenizer, _UNKNOWN, longest):
                return TextBound()
            added = getattr(tokenizer, "added_tokens_decoder", {}).values()
            strips = any(token.lstrip or token.rstrip for token in added)
            return TextBound(longest, not strips and all(_counts(tokenizer, blank, longest) for blank in _BLANKS))
        except Exception:  # noqa: BLE001 - a tokenizer is foreign code, and tokenising works without a bound
            return TextBound()

    def may_fit(self, text: str, num_tokens: int) -> bool:
        """Return whether `text` may have at most `num_tokens` tokens. O(len(text)) at worst, and mostly O(1)."""
        most = self.longest_token * max(1, num_tokens)
        if len(text) <= most:
            return True
        return not self.counts_blanks and sum(map(len, text.split())) <= most


def _counts(tokenizer: Any, letter: str, longest: int) -> bool:  # noqa: ANN401 - as above
    """Return whether a run of `letter` has as many tokens as its length says it must have."""
    text = letter * (longest * _PROBE_TOKENS)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) >= _PROBE_TOKENS


class TextLanes:
    """Threads that tokenise: long texts share one, so that no short one waits for them. Belongs to an event loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "kvgraft-texts")
        self._long = ThreadPoolExecutor(1, "kvgraft-long-texts")

    async def run(self, length: int, work: Callable[[], T]) -> T:
        """Run `work` on a thread for texts of `length` characters; work that has not begun ends with its task."""
        lane = self._long if length > LONG_TEXT else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work)
