"""Refusals before torch is imported: a wrong model, a policy that is not there, too little memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.config import available_memory, check_host_memory, page_key
from kvgraft.donors import BYTES_PER_TOKEN
from kvgraft.errors import ConfigError
from kvgraft.memory.store.registry import require_stores
from kvgraft.models import find_checkpoint, footprint_of, require_on_hub
from kvgraft.reuse.policy import configured_policy
from kvgraft.semantic.registry import require_embedder

if TYPE_CHECKING:
    from kvgraft.config import ServerConfig
    from kvgraft.models import Footprint

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of drivers by which torch may find a GPU: NVIDIA's, AMD's, and either under WSL."""


def check_start(config: ServerConfig) -> None:
    """Refuse settings that a start would fail with later; says in a line on stderr what may fail while serving.

    Raises:
        ConfigError: There is no such model, policy, store or embedder, not enough memory, or no key for the inspector's page.
        ImportError: A package of the store or the embedder is missing.
        IntegrationError: The policy is another package's, and cannot be loaded.
        ModelError: The model's directory or file is not one, or its configuration has impossible sizes.
    """
    for name, bytes_each in (("host_bytes", 1), ("prefix_host_bytes", 1), ("donor_tokens", BYTES_PER_TOKEN)):
        check_host_memory(name, getattr(config, name), bytes_each)
    if config.ui:
        page_key(config)
    configured_policy(config.selection, first_k=config.first_k, recompute_ratio=config.recompute_ratio)
    require_stores(config.store)
    require_embedder(config.embedder)
    checkpoint = find_checkpoint(config.model)
    found = footprint_of(checkpoint)
    if found is None:
        require_on_hub(checkpoint.source)
    elif not _may_have_gpu(config.device):
        _check_memory(config, found, available_memory())


def _may_have_gpu(device: str) -> bool:
    """Return whether weights and K/V may lie in memory of unknown size."""
    return device.startswith("cuda") or (device == "auto" and any(Path(path).exists() for path in _GPU_DEVICES))


def _check_memory(config: ServerConfig, found: Footprint, free: int) -> None:
    itemsize = _ITEMSIZES["float32" if config.dtype == "auto" else config.dtype]
    weights = found.weight_bytes(itemsize)
    kv, named = _kv(config, found, itemsize)
    reserved = weights + kv + config.prefix_host_bytes
    if weights > free:
        raise ConfigError(
            f"the weights of model {config.model} take {_gib(weights)} and {_gib(free)} of memory are free; "
            "choose a smaller model, or dtype bfloat16"
        )
    if reserved > free:
        host = f", prefix_host_bytes {_gib(config.prefix_host_bytes)}" if config.prefix_host_bytes else ""
        raise ConfigError(
            f"weights take {_gib(weights)}, K/V {_gib(kv)}{host}, and {_gib(free)} of memory are free; lower {named}"
            + (" or prefix_host_bytes" if host else "")
        )
    if reserved + config.host_bytes > free:
        print(
            f"kvgraft: host_bytes of {_gib(config.host_bytes)} may not fit: weights and K/V take {_gib(reserved)} of "
            f"{_gib(free)} of memory that are free; lower host_bytes if others need theirs",
            file=sys.stderr,
        )


def _kv(config: ServerConfig, found: Footprint, itemsize: int) -> tuple[int, str]:
    """Return the bytes of the K/V slots, and the setting of their number."""
    if config.num_slots:
        return config.num_slots * found.kv_per_token * itemsize, "num_slots"
    return config.kv_bytes, "kv_bytes"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
