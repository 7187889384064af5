"""Settings of the vLLM connector."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.config.reuse import REUSE, AdapterSettings, mode_setting
from kvgraft.config.setting import overridden, setting

_SCHEDULING = "scheduling"
_ROW_COST = 2
"""Tokens of a prefill that take as long as a row of a repair (docs/results.md, T8)."""


@dataclass(frozen=True, slots=True)
class VLLMConfig(AdapterSettings):
    """Settings that `GraftConnector` reads from `kv_connector_extra_config`.

    Each field says in its help what it does; docs/reference/settings.md lists them.
    """

    # The connector can compare keys, in vLLM's first layers, and sum what the query attends to, in a pass of its own.
    selection: str = overridden(
        AdapterSettings,
        "selection",
        choices=("none", "random", "first_k", "kv_deviation", "query_attention", "query_seam"),
    )
    # All donors are host copies here: vLLM's own blocks hold none for long. Other engines keep donors on the device first.
    host_bytes: int = overridden(AdapterSettings, "host_bytes", 4 << 30)
    mode: str = mode_setting()
    load: str = setting(
        "auto",
        "when grafts run: sync in the step that admits the request, async in pieces while it waits, auto by their size; "
        "always async with asynchronous scheduling, Model Runner V2, several KV cache groups or donors out of a store",
        _SCHEDULING,
        choices=("auto", "sync", "async"),
    )
    max_recompute_tokens_per_step: int = setting(
        2048,
        "tokens that grafts and their repairs may compute in one engine step, all requests together, so that running streams "
        "are not stalled; requests wait for a step that has room, several together half of max_num_batched_tokens at most",
        _SCHEDULING,
        low=1,
    )
    min_saved_tokens: int = setting(
        64, "least tokens that a graft must save on balance; a graft costs a further forward pass", REUSE, low=0
    )

    def rows_together(self, max_num_batched_tokens: int | None) -> int:
        """Return how many rows of several grafts and repairs may share a step.

        They take about as long as vLLM's own longest step, of `max_num_batched_tokens`; what vLLM computes beside them comes
        on top. One graft may have more, up to `max_recompute_tokens_per_step`, and has a step alone then.
        """
        if max_num_batched_tokens is None:
            return self.max_recompute_tokens_per_step
        return min(self.max_recompute_tokens_per_step, max(1, max_num_batched_tokens // _ROW_COST))
