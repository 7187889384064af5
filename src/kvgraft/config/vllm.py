"""Settings of the vLLM connector."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.config.setting import setting
from kvgraft.config.settings import Settings

CONNECTOR = "vLLM connector"


@dataclass(frozen=True, slots=True)
class VLLMConfig(Settings):
    """What `GraftConnector` reads from `kv_connector_extra_config`.

    Each field says in its help what it does; docs/integrations/vllm.md lists them.
    """

    mode: str = setting(
        "graft",
        "what requests may reuse that do not say so themselves",
        CONNECTOR,
        choices=("off", "exact", "graft"),
    )
    selection: str = setting(
        "first_k",
        "policy that chooses reused tokens to compute again",
        CONNECTOR,
        choices=("none", "first_k", "kv_deviation"),
    )
    first_k: int = setting(16, "tokens per run that first_k computes again", CONNECTOR, low=1)
    recompute_ratio: float = setting(
        0.15,
        "share of reused tokens that kv_deviation computes again",
        CONNECTOR,
        above=0,
        high=1,
        remedy="selection='none' recomputes nothing",
    )
    min_run: int = setting(
        32, "shortest run of equal tokens that is reused, and shortest text that becomes a donor", CONNECTOR, low=16
    )
    max_generation: int = setting(
        2,
        "highest generation of a donor: 0 is text computed behind exact K/V, g + 1 behind donors of g",
        CONNECTOR,
        low=0,
    )
    host_bytes: int = setting(
        4 << 30, "host memory for the K/V of donors, in each worker process", CONNECTOR, low=0, size=True
    )
    donor_tokens: int = setting(1 << 22, "tokens that the donor catalogue may hold", CONNECTOR, low=16)
    load: str = setting(
        "auto",
        "when grafts run: sync in the step that admits the request, async in pieces while it waits, auto by their size",
        CONNECTOR,
        choices=("auto", "sync", "async"),
    )
    max_recompute_tokens_per_step: int = setting(
        2048,
        "tokens that grafts may compute in one engine step, so that running streams are not stalled",
        CONNECTOR,
        low=1,
    )
    lookup_deadline_ms: float = setting(
        20.0, "a lookup that is expected to take longer is not begun; the request counts as a miss", CONNECTOR, above=0
    )
    min_saved_tokens: int = setting(
        64, "least tokens that a graft must save on balance; a graft costs a further forward pass", CONNECTOR, low=0
    )
