"""Settings of the embedded engine, and the only place that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How `LLM` loads a model, how much K/V it keeps and what it reuses.

    Attributes:
        dtype: `auto` (float32 on a CPU, the checkpoint's own on a GPU), `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        num_slots: K/V slots on the device, one per token; 0 chooses from `kv_bytes`.
        kv_bytes: Bytes of device memory for K/V where `num_slots` is 0.
        host_bytes: Bytes of host memory for donors that no longer fit on the device.
        donor_tokens: Tokens that the donor catalogue may hold in all tiers.
        max_model_len: Longest prompt plus output; 0 takes the model's own limit.
        selection: Policy that chooses reused tokens to compute again: `none`, `first_k`, `query_seam`.
        recompute_ratio: Share of reused tokens that `query_seam` computes again.
        first_k: Tokens per run that `first_k` computes again.
        min_run: Shortest run of equal tokens that is reused, and shortest text that becomes a donor.
        max_generation: Highest generation of a donor: 0 is text computed behind exact K/V only, g + 1 text computed behind
            donors of generation g.
        max_rows: Rows of one forward pass; longer prefills run in pieces.
        max_running: Requests that are computed at the same time.
        max_waiting: Requests that may wait for their turn; more are refused.
        stream_slowdown: How much slower running streams may get while prompts are computed; 0.2 is 20 %.
        attention: Attention backend: `auto`, `sdpa` or `flex`.
    """

    dtype: str = "auto"
    device: str = "auto"
    num_slots: int = 0
    kv_bytes: int = 1 << 30
    host_bytes: int = 1 << 30
    donor_tokens: int = 1 << 22
    max_model_len: int = 0
    selection: str = "query_seam"
    recompute_ratio: float = 0.05
    first_k: int = 16
    min_run: int = 16
    max_generation: int = 2
    max_rows: int = 16_384
    max_running: int = 64
    max_waiting: int = 1024
    stream_slowdown: float = 0.2
    attention: str = "auto"

    def __post_init__(self) -> None:
        lowest = {"kv_bytes": 1, "donor_tokens": 1, "min_run": 16, "max_rows": 1, "first_k": 1, "max_running": 1, "max_waiting": 1}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < lowest.get(field.name, 0):
                raise ConfigError(f"{field.name} must be at least {lowest.get(field.name, 0)}, not {value}")
        if not self.stream_slowdown > 0:
            raise ConfigError(f"stream_slowdown must be above 0, not {self.stream_slowdown}; 0.2 allows 20 %")
        if not 0 < self.recompute_ratio <= 1:
            raise ConfigError(
                f"recompute_ratio must be above 0 and at most 1, not {self.recompute_ratio}; "
                "selection='none' recomputes nothing"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; an unknown key or a value of the wrong type raises `ConfigError`."""
        return cls().updated(values)

    @classmethod
    def from_env(cls, prefix: str = "KVGRAFT_", environ: Mapping[str, str] | None = None) -> Self:
        """Build from variables such as `KVGRAFT_NUM_SLOTS`; unset ones keep their default."""
        return cls().updated_from_env(prefix, environ)

    def updated_from_env(self, prefix: str = "KVGRAFT_", environ: Mapping[str, str] | None = None) -> Self:
        """Return a copy with the settings that variables such as `KVGRAFT_NUM_SLOTS` give."""
        environ = os.environ if environ is None else environ
        names = {prefix + field.name.upper(): field.name for field in fields(self)}
        return self.updated({names[key]: text for key, text in environ.items() if key in names})

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with `values` set; texts are parsed into the type of the field."""
        known = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}; known are {', '.join(sorted(known))}")
            try:
                parsed[name] = known[name](value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name} must be a {known[name].__name__}, not {value!r}") from error
        return replace(self, **parsed)
