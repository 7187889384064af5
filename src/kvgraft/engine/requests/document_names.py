"""Names that clients give to parts of their prompts, and how much of each was reused. Nothing is computed by names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.engine.requests.donor_names import MAX_LABELS
from kvgraft.engine.requests.token_spans import token_spans
from kvgraft.errors import ConfigError
from kvgraft.types import Fidelity, NamedPart

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from kvgraft.types import GraftReport

MAX_NAME_CHARS = 256
_EXACT, _CONTINUED = (Fidelity.EXACT,), (Fidelity.CONTINUED,)
_COPIED = (Fidelity.SHIFTED, Fidelity.SUBSTITUTED)


@dataclass(frozen=True, slots=True)
class DocumentLabel:
    """Name of a part of a prompt.

    Attributes:
        document_id: Name, 1 to 256 characters.
        start: First character of a prompt that is text, first token of one that is token ids.
        stop: The one after the last.
    """

    document_id: str
    start: int
    stop: int


def labelled_tokens(
    prompt: str | None,
    num_tokens: int,
    labels: Sequence[DocumentLabel],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    add_special_tokens: bool,
) -> tuple[NamedPart, ...]:
    """Return which tokens of a prompt labels are about: all that have a character of it.

    Args:
        prompt: Its text; None if it was given as token ids.
        num_tokens: Of the prompt.
        labels: In characters of the text, or in tokens.
        tokenizer: Made the tokens.
        add_special_tokens: Whether it added its own.

    Raises:
        ConfigError: There are more than `MAX_LABELS`, one is empty, out of range or has no name, or the tokenizer does not
            say where tokens lie.
    """
    _check_labels(prompt, num_tokens, labels)
    if prompt is None:
        return tuple(NamedPart(label.document_id, label.start, label.stop - label.start) for label in labels)
    spans = token_spans(tokenizer, prompt, add_special_tokens=add_special_tokens) if labels else []
    if spans is None:
        raise ConfigError(
            "this model's tokenizer does not say where tokens lie in a text; give token ids, and ranges of them"
        )
    return _tokens_of(labels, np.asarray(spans, np.int64).reshape(-1, 2))


def _check_labels(prompt: str | None, num_tokens: int, labels: Sequence[DocumentLabel]) -> None:
    if len(labels) > MAX_LABELS:
        raise ConfigError(
            f"a prompt has at most {MAX_LABELS} document labels, not {len(labels)}; give fewer, longer ones"
        )
    for label in labels:
        if not (isinstance(label.document_id, str) and 0 < len(label.document_id) <= MAX_NAME_CHARS):
            raise ConfigError(
                f"a document's id is a text of 1 to {MAX_NAME_CHARS} characters, not {quoted(label.document_id)}"
            )
        length = num_tokens if prompt is None else len(prompt)
        if not 0 <= label.start < label.stop <= length:
            unit = "tokens" if prompt is None else "characters"
            raise ConfigError(
                f"document {quoted(label.document_id)} is {label.start} to {label.stop} of {length} {unit}; "
                "give a range of the prompt that is not empty"
            )


def _tokens_of(labels: Sequence[DocumentLabel], bounds: NDArray[np.int64]) -> tuple[NamedPart, ...]:
    """Return where tokens have characters of labels, from the characters of each token, int64 (num_tokens, 2)."""
    tokens = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
    # Tokens of one character share it; these two ascend with every tokenizer.
    starts = np.minimum.accumulate(bounds[tokens, 0][::-1])[::-1]
    stops = np.maximum.accumulate(bounds[tokens, 1])
    firsts = np.searchsorted(stops, [label.start for label in labels], side="right")
    ends = np.searchsorted(starts, [label.stop for label in labels], side="left")
    return tuple(
        NamedPart(label.document_id, int(tokens[first]), int(tokens[last - 1] - tokens[first]) + 1)
        for label, first, last in zip(labels, firsts, ends, strict=True)
        if first < last
    )


def document_reuse(documents: Iterable[NamedPart], report: GraftReport) -> list[dict[str, object]]:
    """Say of each named part of a prompt how many of its tokens were exact, how many continued, how many copied from donors.

    A part is continued where an earlier request had it in its place after the same text, approximate: whether the engine
    shares that, or copies it from a donor. Copied are those that stood elsewhere, or after other text.

    Complexity: O((parts + spans) log spans); spans of a report do not overlap.
    """
    documents = list(documents)
    exact_spans = _extents(report, _EXACT)
    prefix_len = int(report.exact_tokens) - sum(length for _, length in exact_spans)
    exact = _inside([(0, prefix_len), *exact_spans], documents)
    continued = _inside(_extents(report, _CONTINUED), documents)
    copied = _inside(_extents(report, _COPIED), documents)
    return [
        {
            "id": part.document_id,
            "start": part.start,
            "length": part.length,
            "exact_tokens": num_exact,
            "continued_tokens": num_continued,
            "copied_tokens": num_copied,
        }
        for part, num_exact, num_continued, num_copied in zip(documents, exact, continued, copied, strict=True)
    ]


def _extents(report: GraftReport, classes: Collection[Fidelity]) -> list[tuple[int, int]]:
    """Return start and length of the spans of some classes, ascending."""
    return sorted((int(span.target_start), int(span.length)) for span in report.spans if span.fidelity in classes)


def _inside(extents: Sequence[tuple[int, int]], documents: Sequence[NamedPart]) -> list[int]:
    """Return how many tokens of disjoint, ascending extents each part has."""
    before_stop = _tokens_before(extents, [part.stop for part in documents])
    inside: list[int] = (before_stop - _tokens_before(extents, [part.start for part in documents])).tolist()
    return inside


def _tokens_before(extents: Sequence[tuple[int, int]], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return how many tokens of disjoint, ascending extents are before each position, int64 (num_positions,)."""
    starts, lengths = np.asarray([(-1, 0), *extents], np.int64).T
    last = np.searchsorted(starts, positions, side="left") - 1
    before = np.concatenate([[0], np.cumsum(lengths)])
    found: NDArray[np.int64] = before[last] + np.minimum(np.asarray(positions, np.int64) - starts[last], lengths[last])
    return found
