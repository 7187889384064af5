"""What vLLM reports as cached of a prompt: of a graft that it was promised what was copied, and not what was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.request import Request


def first_prefill(request: Request) -> PrefillStats | None:
    """Return vLLM's counts of a request's first prefill, into which it writes at admission; None if they are written.

    The client's usage and the metrics of prompt tokens are made of this object, at the end of the step of the first token.
    """
    is_first = getattr(request, "num_preemptions", 0) == 0
    return getattr(request, "prefill_stats", None) if is_first else None


def count_as_computed(stats: PrefillStats | None, num_promised: int, num_computed: int) -> None:
    """Move tokens from those that vLLM had cached to those that were computed: gaps between copies, or all of a promise.

    Nothing changes where it has counted another promise: the request has begun again since.
    """
    if stats is None or getattr(stats, "num_external_cached_tokens", 0) != num_promised:
        return
    stats.num_external_cached_tokens -= num_computed
    stats.num_cached_tokens -= num_computed
    stats.num_computed_tokens += num_computed
