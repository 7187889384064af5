"""Score answers as the field does: word F1 and exact match after SQuAD's normalisation, and whether a value is right.

Source: Rajpurkar et al., https://arxiv.org/abs/1606.05250 (normalisation: case, punctuation, articles, white space).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DENIALS = (
    "not mention",
    "not mentioned",
    "not specify",
    "not specified",
    "not state",
    "not stated",
    "not provide",
    "not provided",
    "not contain",
    "not available",
    "not found",
    "not possible",
    "not have access",
    "not know",
    "dont know",
    "dont have",
    "doesnt mention",
    "doesnt say",
    "doesnt provide",
    "doesnt contain",
    "no information",
    "no mention",
    "no answer",
    "unable",
    "cannot",
    "unknown",
)
"""Words side by side, normalised, with which models say that a text does not have what is asked."""


def normalised(text: str) -> list[str]:
    """Return the words of an answer without case, punctuation and articles."""
    words = text.lower().translate(_PUNCTUATION).split()
    return [word for word in words if word not in {"a", "an", "the"}]


def f1(answer: str, right: Sequence[str]) -> float:
    """Return word F1 with the nearest of the right answers."""
    return max(_f1(normalised(answer), normalised(each)) for each in right)


def contains(answer: str, right: Sequence[str]) -> float:
    """Return 1 where the words of a right answer occur in the answer side by side, else 0."""
    return float(any(_occurs(normalised(each), normalised(answer)) for each in right))


def value(answer: str, right: Sequence[str]) -> float:
    """Return 1 where the first number of the answer is the right one; a value without digits is compared as words."""
    digits = re.search(r"\d+", answer)
    for each in right:
        if each.isdigit():
            if digits is not None and digits[0] == each:
                return 1.0
        elif normalised(answer) == normalised(each):
            return 1.0
    return 0.0


def is_stale(answer: str, right: Sequence[str], stale: Sequence[str]) -> float:
    """Return 1 where the answer was right for the text read before and is not right now."""
    return float(bool(contains(answer, stale)) and not contains(answer, right))


def denies(answer: str) -> float:
    """Return 1 where the answer says that the text does not have what is asked, which F1 alone does not show."""
    words = normalised(answer)
    return float(any(_occurs(each.split(), words) for each in _DENIALS))


METRICS = {"f1": f1, "value": value}
"""By the name that a suite gives."""


def _f1(answer: list[str], right: list[str]) -> float:
    common = (Counter(answer) & Counter(right)).total()
    if not common:
        return float(answer == right)
    return 2 * common / (len(answer) + len(right))


def _occurs(words: list[str], inside: list[str]) -> bool:
    length = len(words)
    return length > 0 and any(inside[start : start + length] == words for start in range(len(inside) - length + 1))
