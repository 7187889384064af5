"""Put the K/V of a plan's spans into a request's slots: those in memory at once, those of a store as they arrive.

What does not come, or not in time, is cut from the plan before the first row is computed, so that a report has what was
really copied and the rest is computed like any other text.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.requests.donor_names import DocumentNames
from kvgraft.errors import StoreError, one_line
from kvgraft.graft.executor import BlockSource, RotatedSpans, SpanCopy, copy_spans
from kvgraft.reuse.lineage import reused_span
from kvgraft.reuse.stored import StoredKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.engine.stores.store_tier import StoreTier
    from kvgraft.reuse.reads import StoredReads, StoredSpan
    from kvgraft.types import DonorId, Match

logger = logging.getLogger(__name__)


class Grafting:
    """Copies the spans of plans. Not thread-safe.

    Attributes:
        num_errors: Spans from stores that could not be copied, and were computed.
        names: Names that requests have given to parts of donors.
    """

    def __init__(self, adapter: TransformersAdapter, space: KVSpace, flops: ModelFlops) -> None:
        self.num_errors = 0
        self.names = DocumentNames(space.donors)
        self._adapter = adapter
        self._space = space
        self._flops = flops

    def begin_reads(self, kv: RequestKV) -> None:
        """Begin to read what lies in stores alone; all donors are pinned."""
        if self._space.stores is None or kv.decision.substitution is not None:
            return
        stored = [match for match, donor, _ in kv.decision.spans() if isinstance(donor.kv, StoredKV)]
        flops = sum(self._flops.of_positions(np.arange(match.target_start, match.target_end)) for match in stored)
        kv.held.reads = self._space.stores.begin_reads(kv.plan.spans, kv.decision.donors, flops)

    def copy_resident(self, kv: RequestKV) -> None:
        """Copy the resident spans."""
        resident = [
            SpanCopy(self._space.source(donor, match), *_places(match, donor))
            for match, donor, _ in kv.decision.spans()
            if not isinstance(donor.kv, StoredKV)
        ]
        if not resident:
            return
        self._copy(kv, resident)
        if self._space.stores is not None:
            for match in kv.plan.spans:
                self._space.stores.used_resident(match)

    def copy_arrived(self, kv: RequestKV, reads: StoredReads, stores: StoreTier) -> bool:
        """Copy the spans that have come from stores; True when none is awaited any more, for lack of time at last."""
        for span in reads.pending():
            if not span.is_pending:
                span.is_over = True
                span.is_copied = self._copy_stored(kv, span, stores)
        if reads.is_late:
            for span in reads.pending():
                span.is_over = True
                stores.gave_up(span)
        return not reads.pending()

    def _copy_stored(self, kv: RequestKV, span: StoredSpan, stores: StoreTier) -> bool:
        """Copy one span; a failure is counted, and it is computed."""
        try:
            source = BlockSource(stores.taken(span), self._adapter.pool.device)
            assert span.donor is not None
            self._copy(kv, [SpanCopy(source, *_places(span.match, span.donor))])
        except StoreError as error:  # counted by the reader
            logger.info("a span of request %s is computed: %s", kv.request.request_id, one_line(error))
            return False
        except Exception as error:
            self._space.doubt(error)
            self.num_errors += 1
            logger.exception("a span of request %s cannot be copied and is computed", kv.request.request_id)
            return False
        return True

    def note(self, kv: RequestKV) -> None:
        """Note in lineage and catalogue what was copied."""
        is_substituted = kv.decision.substitution is not None
        spans = (
            reused_span(match, donor, tier=tier, is_substituted=is_substituted)
            for match, donor, tier in kv.decision.spans()
        )
        kv.lineage.copy(self.names.named(spans))
        saved: Counter[DonorId] = Counter()
        for match in kv.plan.spans:
            saved[match.donor_id] += match.length
        for donor_id, num_tokens in saved.items():
            self._space.record_use(donor_id, num_tokens)

    def _copy(self, kv: RequestKV, copies: Sequence[SpanCopy]) -> None:
        adapter, swa_indices = self._adapter, kv.swa_indices
        spans = RotatedSpans(copies, adapter.rope, adapter.pool.device)
        where = spans.positions
        place = adapter.pool.place(kv.kv_indices[where], None if swa_indices is None else swa_indices[where])
        copy_spans(spans, place, range(adapter.num_layers))


def _places(match: Match, donor: Donor) -> tuple[int, int, int]:
    """Return the position where a span's K/V were computed, the one where they go, and the number of tokens."""
    return donor.start_position + match.donor_start, match.target_start, match.length
