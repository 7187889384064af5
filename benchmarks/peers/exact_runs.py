"""A lookup for semblend-vllm-connector: runs of equal tokens, at any offset, in any prompt that was read before.

The connector's own providers either return no spans (`local`) or embed the text with a sentence encoder (`semblend`), to
which random tokens say nothing. This one stands for an ideal lookup, so that what is measured is the connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semblend_vllm_connector.types import MaterializationKind, SemanticLookupResult, SemanticSegment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_vllm_connector.types import DonorRegistration, SemanticLookupRequest

_GRAM = 16
_MAX_DONORS = 16
"""As many as the connector keeps K/V of in memory."""


class ExactRunsProvider:
    """Keeps the newest donors; answers with the one that has the most tokens of the prompt."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - the connector's configuration
        del config
        self._donors: dict[str, DonorRegistration] = {}

    def register_donor(self, donor: DonorRegistration) -> None:
        """Remember a donor."""
        self._donors[donor.donor_id] = donor
        if len(self._donors) > _MAX_DONORS:
            del self._donors[next(iter(self._donors))]

    def clear_donors(self) -> None:
        """Forget all."""
        self._donors.clear()

    def lookup(self, request: SemanticLookupRequest) -> SemanticLookupResult | None:
        """Find the best donor of the request's namespace."""
        target = list(request.token_ids)
        best: list[SemanticSegment] = []
        for donor in self._donors.values():
            if donor.namespace == request.namespace:
                runs = [
                    SemanticSegment(donor.donor_id, start, at, length)
                    for start, at, length in equal_runs(list(donor.token_ids), target)
                ]
                best = max(best, runs, key=_num_tokens)
        if not best:
            return None
        return SemanticLookupResult(
            donor_id=best[0].donor_id,
            similarity=1.0,
            reusable_token_count=_num_tokens(best),
            materialization_kind=MaterializationKind.SEMANTIC_SPAN,
            segments=best,
            reason="equal tokens",
        )


def equal_runs(donor: list[int], target: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs `(donor_start, target_start, length)` of at least `2 * _GRAM` equal tokens, greedily from the front. O(tokens)."""
    grams = {tuple(donor[start : start + _GRAM]): start for start in range(0, len(donor) - _GRAM + 1, _GRAM)}
    at = 0
    while at + _GRAM <= len(target):
        start = grams.get(tuple(target[at : at + _GRAM]))
        if start is None:
            at += 1
            continue
        first, donor_first = at, start
        while first > 0 and donor_first > 0 and target[first - 1] == donor[donor_first - 1]:
            first, donor_first = first - 1, donor_first - 1
        while at < len(target) and start < len(donor) and target[at] == donor[start]:
            at, start = at + 1, start + 1
        if at - first >= 2 * _GRAM:
            yield donor_first, first, at - first


def _num_tokens(runs: list[SemanticSegment]) -> int:
    return sum(run.token_count for run in runs)
