"""One request of a suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt; `document` names the text where other requests have it too."""

    text: str
    document: str | None = None


@dataclass(frozen=True, slots=True)
class FidelityRequest:
    """A prompt, and what is known of its answer.

    Attributes:
        rid: Name, once per suite.
        parts: Of the prompt, which joins them by an empty line.
        keys: Documents that the prompt has; its group where the pack names none.
        group: What the pack calls its group: a session, a record, a source.
        answers: Right ones, maybe none.
        stale: Answers that would be right for `donor`, where these are others.
        donor: Parts of the one prompt that has been read before, where the suite says which.
    """

    rid: str
    parts: tuple[Part, ...]
    keys: tuple[str, ...]
    group: str
    answers: tuple[str, ...]
    stale: tuple[str, ...] = ()
    donor: tuple[str, ...] | None = None

    @property
    def prompt(self) -> str:
        """The text that is asked."""
        return _SEPARATOR.join(part.text for part in self.parts)

    @property
    def donor_prompt(self) -> str | None:
        """The text that has been read before, where the suite says which."""
        return None if self.donor is None else _SEPARATOR.join(self.donor)

    def scrambled(self, rng: random.Random) -> str:
        """Return the prompt with the words of every document shuffled: same words and length, no run that was read before."""
        texts = []
        for part in self.parts:
            words = part.text.split()
            if part.document is not None or len(self.parts) == 1:
                rng.shuffle(words)
                texts.append(" ".join(words))
            else:
                texts.append(part.text)
        return _SEPARATOR.join(texts)
