"""Put the K/V of a plan's spans into a request's slots: those in memory at once, those of a store as they arrive.

What does not come, or not in time, is cut from the plan before the first row is computed, so that a report tells of what was
really copied and the rest is computed like any other text.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.document_names import DocumentNames
from kvgraft.errors import StoreError, one_line
from kvgraft.graft.executor import BlockSource, RotatedSpans, SpanCopy, copy_spans
from kvgraft.reuse.lineage import reused_span
from kvgraft.reuse.stored import StoredKV
from kvgraft.types import GraftPlan, Match, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.cold_spans import ColdSpan
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request import Request
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.engine.risk import HeldRisk
    from kvgraft.reuse.lookup import Found
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)


class Grafting:
    """Copies what plans name. Not thread-safe.

    Attributes:
        num_errors: Spans from stores that could not be copied, and were computed.
        names: What requests have called the texts of donors.
    """

    def __init__(self, adapter: TransformersAdapter, space: KVSpace, risk: HeldRisk, flops: ModelFlops) -> None:
        self.num_errors = 0
        self.names = DocumentNames(space.donors)
        self._adapter = adapter
        self._space = space
        self._risk = risk
        self._flops = flops

    def adopt(self, kv: RequestKV, found: Found) -> None:
        """Take over what a lookup has planned, as far as donors are still there and the risk is held."""
        planned = found.planned
        if isinstance(planned, Miss):
            kv.miss = planned
            return
        donors = [self._space.donors.get(match.donor_id) for match in planned.spans]
        pairs = [(match, donor) for match, donor in zip(planned.spans, donors, strict=True) if donor is not None]
        if len(pairs) != len(planned.spans):  # a look for other text made room on the host
            kv.miss = Miss(MissReason.NO_DONORS, "a donor left during the lookup")
            return
        kv.miss = self._serve(kv, kv.request, pairs)

    def _serve(self, kv: RequestKV, request: Request, pairs: Sequence[tuple[Match, Donor]]) -> Miss | None:
        """Decide how a graft of these spans is served; returns why it is not, and changes no plan then.

        Exact spans bear no risk, and are copied whatever is said of the others.
        """
        exact = [pair for pair in pairs if pair[0].is_exact]
        kv.risk, kv.sampled = self._risk.stated(request), None
        if len(exact) < len(pairs):
            served = self._risk.serve(request, [reused_span(*pair) for pair in pairs if not pair[0].is_exact])
            kv.risk, kv.sampled = served.statement, served.sampled
            if served.policy is not None:
                request = replace(request, policy=served.policy)
            elif exact:
                pairs = exact
            else:
                return Miss(MissReason.RISK, f"grafts of this kind are at notch {served.statement.notch!r}")
        kv.plan = GraftPlan.over(kv.plan.num_tokens, kv.plan.exact_len, [match for match, _ in pairs])
        kv.donors, kv.request = tuple(donor for _, donor in pairs), request
        return None

    def begin_reads(self, kv: RequestKV, request: Request) -> None:
        """Begin to read what lies in stores alone; all donors are pinned.

        Args:
            kv: With its plan.
            request: As it was before it was planned.
        """
        kv.tiers = tuple(self._space.tier_of(donor) for donor in kv.donors)
        if self._space.stores is None or kv.substitution is not None:
            return
        cold = [match for match, donor in zip(kv.plan.spans, kv.donors, strict=True) if isinstance(donor.kv, StoredKV)]
        flops = sum(self._flops.of_positions(np.arange(match.target_start, match.target_end)) for match in cold)
        kv.reads = self._space.stores.begin_reads(request, kv.plan.spans, kv.donors, flops)

    def copy_at_hand(self, kv: RequestKV) -> None:
        """Copy the spans whose K/V are in memory."""
        near = [
            SpanCopy(self._space.source(donor, match), *_places(match, donor))
            for match, donor in zip(kv.plan.spans, kv.donors, strict=True)
            if not isinstance(donor.kv, StoredKV)
        ]
        if not near:
            return
        self._copy(kv, near)
        if self._space.stores is not None:
            for match in kv.plan.spans:
                self._space.stores.used_at_hand(match)

    def copy_arrived(self, kv: RequestKV) -> bool:
        """Copy the spans that have come from stores; True when none is awaited any more, for lack of time at last."""
        reads, stores = kv.reads, self._space.stores
        assert reads is not None
        assert stores is not None
        for span in reads.arrivals():
            span.is_over = True
            span.is_copied = self._copy_cold(kv, span)
        if reads.is_late:
            for span in reads.pending():
                span.is_over = True
                stores.gave_up(span)
        return reads.is_settled

    def _copy_cold(self, kv: RequestKV, span: ColdSpan) -> bool:
        """Copy one span; a failure is counted, and it is computed."""
        assert self._space.stores is not None
        try:
            source = BlockSource(self._space.stores.taken(span), self._adapter.pool.device)
            self._copy(kv, [SpanCopy(source, *_places(span.match, span.donor))])
        except StoreError as error:  # counted by the reader
            logger.info("a span of request %s is computed: %s", kv.request.request_id, one_line(error))
            return False
        except Exception:
            self.num_errors += 1
            logger.exception("a span of request %s cannot be copied and is computed", kv.request.request_id)
            return False
        return True

    def cut(self, kv: RequestKV) -> Miss | None:
        """Leave out of the plan what has not come; returns why nothing is grafted, if nothing is."""
        reads = kv.reads
        assert reads is not None
        kv.timings_ms["read"] = reads.elapsed_ms
        lost = {id(span.match) for span in reads.spans if not span.is_copied}
        if not lost:
            return None
        pairs = zip(kv.plan.spans, kv.donors, strict=True)
        kept = [(match, donor) for match, donor in pairs if id(match) not in lost]
        if not kept:
            return Miss(MissReason.STORE, "nothing that was to be read has come in time")
        tiers = dict(zip(kv.plan.spans, kv.tiers, strict=True))
        miss = self._serve(kv, reads.request, kept)
        kv.tiers = tuple(tiers[match] for match in kv.plan.spans)
        return miss

    def note(self, kv: RequestKV) -> None:
        """Note in lineage and catalogue what was copied."""
        entries, is_substituted = zip(kv.plan.spans, kv.donors, kv.tiers, strict=True), kv.substitution is not None
        spans = (reused_span(match, donor, tier=tier, is_substituted=is_substituted) for match, donor, tier in entries)
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
    """Where a span's K/V were computed, where they go, and how many tokens they are."""
    return donor.start_position + match.donor_start, match.target_start, match.length
