"""Text that a client shows of tokens that may be taken back, and what it has to take back of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvgraft.engine.requests.request import StreamPart


@dataclass(frozen=True, slots=True)
class Change:
    """Change of the text that the client has; none without characters and text.

    Attributes:
        characters: How many of the last characters are void.
        tokens: Provisional tokens that are taken back.
        text: What follows then.
    """

    characters: int = 0
    tokens: int = 0
    text: str = ""


class _Draft(NamedTuple):
    """A provisional token that is neither confirmed nor taken back, and where its text begins in the client's."""

    token_id: int
    start: int


class ProvisionalText:
    """The text that the client of one choice has: verified text, and after it what is provisional.

    After each part the client has all verified text, character by character, and what the provisional tokens that are left
    would add. Text that is there already is not sent again, and as little as possible is taken back: where the true token
    begins as the wrong one did, the beginning stays. With parts that are all verified it hands their texts on.

    The rules of the parts are `StreamPart`'s. That a token is confirmed says nothing of its text, which may be held back
    for a stop text or an incomplete character; so texts are compared, not counted.
    """

    def __init__(self) -> None:
        self._num_verified = 0
        self._ahead = ""
        self._drafts: deque[_Draft] = deque()

    def take(self, part: StreamPart) -> Change:
        """Take the next part. O(length of the provisional text)."""
        ahead, tokens = self._without_newest(part.num_retracted, self._ahead)
        if part.is_provisional:
            self._drafts.append(_Draft(part.token_id, self._num_verified + len(ahead)))
            return self._change(ahead + part.text, tokens)
        is_confirmed = bool(self._drafts) and self._drafts[0].token_id == part.token_id
        if is_confirmed:
            self._drafts.popleft()
        if not is_confirmed or part.output is not None:
            ahead, more = self._without_newest(len(self._drafts), ahead)
            tokens += more
        if part.output is not None or not ahead.startswith(part.text):
            ahead = part.text
        change = self._change(ahead, tokens)
        self._num_verified += len(part.text)
        self._ahead = ahead[len(part.text) :]
        return change

    def _without_newest(self, num_tokens: int, ahead: str) -> tuple[str, int]:
        """Forget the newest provisional tokens; returns the text ahead without theirs, and how many there were."""
        dropped = [self._drafts.pop() for _ in range(min(num_tokens, len(self._drafts)))]
        if not dropped:
            return ahead, 0
        return ahead[: max(0, dropped[-1].start - self._num_verified)], len(dropped)

    def _change(self, ahead: str, tokens: int) -> Change:
        """Put `ahead` after the verified text instead of what is there."""
        num_kept = _num_common(self._ahead, ahead)
        change = Change(len(self._ahead) - num_kept, tokens, ahead[num_kept:])
        self._ahead = ahead
        return change


def _num_common(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
