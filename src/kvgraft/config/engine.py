"""Settings of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.config.reuse import MEMORY, REUSE, ReuseSettings
from kvgraft.config.setting import overridden, setting

MODEL, SCHEDULING, RISK = "model", "scheduling", "risk"
_ALLOWED_DEVICES = ("[a-z]+(:[0-9]+)?", "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True)
class EngineConfig(ReuseSettings):
    """How the engine loads a model, how much K/V it keeps, what it reuses and how it shares steps among requests.

    Each field says in its help what it does; `kvgraft config show` and docs/reference/settings.md list them.
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
    heal: str = setting(
        "idle",
        "when what grafted requests have left is computed exactly: never, while no request runs, or beside streams, too",
        REUSE,
        choices=("off", "idle", "always"),
    )
    embedder: str = setting(
        "none",
        "proposes donors that the index may have lost: none, minhash, tfidf, minilm, minilm:DIRECTORY or a registered one",
        REUSE,
    )
    # 0 until a GPU has been measured: on a processor rows cost, and each one that is computed takes back what reuse saved.
    repair_rows: int = setting(
        0,
        "with repair=after, rows that each decode step computes exactly besides, until the whole prompt is exact; 0 for none",
        REUSE,
        low=0,
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
    prefix_host_bytes: int = setting(
        0,
        "host memory for exact prefixes that the device has no room for, reserved at the start; 0 keeps none",
        MEMORY,
        low=0,
        size=True,
    )
    hybrid_kvcache_ratio: float = setting(
        0.0,
        "K/V slots of window layers per slot of a token, for models that have such layers; 0 chooses",
        MEMORY,
        low=0,
        high=1,
    )
    max_model_len: int = setting(
        0, "longest prompt plus output in tokens; 0 takes the model's own limit", MODEL, low=2, or_zero=True
    )
    radix_cache_backend: str = setting(
        "default",
        "prefix cache by the name that it was registered under, by an installed package say, or a factory as module:name",
        MEMORY,
    )
    radix_cache_options: str = setting("", "JSON object that such a cache is given", MEMORY, json_object=True)
    page_size: int = setting(
        1, "tokens per page of the prefix cache, which stores and matches whole pages", MEMORY, low=1, high=1 << 16
    )
    eviction_policy: str = setting(
        "lru",
        "in which order stored prefixes leave the prefix cache",
        MEMORY,
        choices=("fifo", "filo", "lfu", "lru", "mru", "priority", "slru", "tlru"),
    )
    eviction_policy_config: str = setting(
        "", """JSON object of its parameters, such as {"protected_threshold": 3} for slru""", MEMORY, json_object=True
    )
    kv_events: str = setting(
        "",
        "endpoint to publish events of the prefix cache on, such as tcp://127.0.0.1:5557, or a JSON object that names it",
        MEMORY,
        may_be_empty=True,
        pattern=(r"|(tcp|ipc|inproc)://\S+|\{.*\}", 'tcp://*:PORT, ipc://PATH or {"endpoint": ...}'),
    )
    max_rows: int = setting(16_384, "rows of one forward pass; longer prefills run in pieces", SCHEDULING, low=1)
    max_running: int = setting(64, "requests that are computed at the same time", SCHEDULING, low=1)
    max_waiting: int = setting(
        1024, "requests that may wait for their turn; more are refused with 429", SCHEDULING, low=1
    )
    max_sessions: int = setting(
        256, "sessions that may be open at the same time; more are refused with 429, 0 keeps none", SCHEDULING, low=0
    )
    session_ttl_s: float = setting(
        600.0,
        "seconds after which an idle session is closed; clients may ask for less",
        SCHEDULING,
        above=0,
        high=86_400,
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
