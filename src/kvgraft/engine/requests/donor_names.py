"""Named parts of donors, by the names that requests gave to their prompts, and which of them a reused span is of."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.types import NamedPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.engine.requests.request import Request
    from kvgraft.types import DonorId, SpanReport

MAX_LABELS = 1024
"""Labels of a request, and named parts in all spans of a report together."""
_MAX_PARTS = 256
"""Named parts that are kept of a donor; the text may be reused by every request, and each reuse reports them."""


class DocumentNames:
    """Named parts of donors: the names that the request of a donor gave to its text.

    A donor has the names of its own request and no others, and only where its tokens are that request's; names of a tenant
    are found by donors, which others do not find. Names leave with their donors; what is joined of several or comes from a
    store may have none. Not thread-safe.
    """

    def __init__(self, donors: DonorCatalogue) -> None:
        self._donors = donors
        self._parts: dict[DonorId, tuple[NamedPart, ...]] = {}
        donors.watch(self)

    def __len__(self) -> int:
        """Number of donors that have names."""
        return len(self._parts)

    def note(self, request: Request, donor_ids: Iterable[DonorId]) -> None:
        """Keep the names that `request` gives to what donors were made of it; positions are those of its prompt."""
        if not request.documents:
            return
        for donor_id in donor_ids:
            donor = None if donor_id in self._parts else self._donors.get(donor_id)
            parts = () if donor is None else tuple(islice(_within(request, donor), _MAX_PARTS))
            if parts:
                self._parts[donor_id] = parts

    def named(self, spans: Iterable[SpanReport]) -> Iterator[SpanReport]:
        """Yield the spans of a report with the named parts of their donors that lie in them, at most `MAX_LABELS` in all."""
        room = MAX_LABELS
        for span in spans:
            documents = tuple(islice(self._parts_in(span), room))
            room -= len(documents)
            yield replace(span, documents=documents)

    def _parts_in(self, span: SpanReport) -> Iterator[NamedPart]:
        offset = span.target_start - span.donor_start
        for part in self._parts.get(span.donor_id, ()):
            inside = _clipped(part, span.donor_start, span.length)
            if inside is not None:
                yield replace(inside, start=inside.start + offset)

    def donor_added(self, donor: Donor, before: object) -> None:
        """It has no names yet."""

    def donor_removed(self, donor: Donor) -> None:
        """Forget its names."""
        self._parts.pop(donor.donor_id, None)

    def donors_reset(self) -> None:
        """Forget all names."""
        self._parts.clear()


def _within(request: Request, donor: Donor) -> Iterator[NamedPart]:
    """Named parts of the donor, as far as it has the very tokens of the request there; positions are the donor's."""
    begin = donor.start_position
    for document in request.documents:
        part = _clipped(document, begin, donor.num_tokens)
        if part is None:
            continue
        text = donor.token_ids[part.start - begin : part.stop - begin]
        if np.array_equal(request.token_ids[part.start : part.stop], text):
            yield replace(part, start=part.start - begin)


def _clipped(part: NamedPart, start: int, length: int) -> NamedPart | None:
    """The part of it that lies in `[start, start + length)`, or None."""
    first, last = max(part.start, start), min(part.stop, start + length)
    return NamedPart(part.document_id, first, last - first) if first < last else None
