"""Settings of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.config.reuse import MEMORY, ReuseSettings
from kvgraft.config.setting import overridden, setting

MODEL, SCHEDULING, RISK = "model", "scheduling", "risk"
_ALLOWED_DEVICES = ("[a-z]+(:[0-9]+)?", "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True)
class EngineConfig(ReuseSettings):
    """How the engine loads a model, how much K/V it keeps, what it reuses and how it shares steps among requests.

    Each field says in its help what it does; `kvgraft config show` and docs/configuration.md list them.
    """

    # The embedded engine shows all that a policy may ask to see.
    selection: str = overridden(
        ReuseSettings,
        "selection",
        choices=("none", "random", "first_k", "kv_deviation", "query_attention", "query_seam", "adaptive"),
    )
    calibration: str = setting(
        "",
        "file of kvgraft calibrate: grafts are served at the notch that it certified, and reports say so",
        RISK,
        may_be_empty=True,
    )
    audit_share: float = setting(
        0.0,
        "share of grafted requests that are compared with full prefill while the engine is idle",
        RISK,
        low=0,
        high=1,
    )
    risk_state: str = setting(
        "", "file that keeps what audits have shown; empty forgets it at the end", RISK, may_be_empty=True
    )
    dtype: str = setting(
        "auto",
        "precision; auto is float32 on a CPU and the checkpoint's own on a GPU",
        MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting("auto", "where to run: auto, cpu, cuda or cuda:N", MODEL, pattern=_ALLOWED_DEVICES)
    num_slots: int = setting(0, "K/V slots on the device, one per token; 0 chooses by kv_bytes", MEMORY, low=0)
    kv_bytes: int = setting(1 << 30, "device memory for K/V where num_slots is 0", MEMORY, low=1, size=True)
    max_model_len: int = setting(
        0, "longest prompt plus output in tokens; 0 takes the model's own limit", MODEL, low=2, or_zero=True
    )
    radix_cache_backend: str = setting(
        "default", "prefix cache by the name that it was registered under, by an installed package say", MEMORY
    )
    max_rows: int = setting(16_384, "rows of one forward pass; longer prefills run in pieces", SCHEDULING, low=1)
    max_running: int = setting(64, "requests that are computed at the same time", SCHEDULING, low=1)
    max_waiting: int = setting(
        1024, "requests that may wait for their turn; more are refused with 429", SCHEDULING, low=1
    )
    stream_slowdown: float = setting(
        0.2,
        "how much slower running streams may get while prompts are computed; 0.2 is 20 %",
        SCHEDULING,
        above=0,
        remedy="0.2 allows 20 %",
    )
    attention: str = setting(
        "auto", "attention backend; auto takes the fastest that works", MODEL, choices=("auto", "sdpa", "flex")
    )
