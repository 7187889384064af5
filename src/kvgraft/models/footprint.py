"""The memory that a checkpoint on this machine takes once loaded, from its files alone."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ModelError
from kvgraft.models.impossible import require_magic, require_sizes
from kvgraft.models.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.models.checkpoint import Checkpoint

_WITHOUT_KV = frozenset({"linear_attention", "conv", "mamba", "moe", "mlp"})
"""Kinds of layers, in configurations, that keep a state or nothing."""
_LARGEST_HEADER = 100 << 20
"""Longest header that the safetensors format allows."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a model takes, as far as its files say.

    Attributes:
        num_weights: Elements of all weights; 0 where the files do not say.
        file_bytes: Of the files that hold them.
        kv_per_token: Elements of K/V per token; 0 where the files do not say. Layers that keep a state have none.
    """

    num_weights: int = 0
    file_bytes: int = 0
    kv_per_token: int = 0

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of the weights in a precision of `itemsize` bytes; 0 is that of the files."""
        return self.num_weights * itemsize or self.file_bytes


def footprint_of(checkpoint: Checkpoint) -> Footprint | None:
    """Return the memory that a model on this machine takes; None for one of the hub.

    Raises:
        ModelError: Its directory has no weights, a configuration that is no JSON object or one of impossible sizes; or its
            file is no GGUF file.
    """
    if checkpoint.gguf is not None:
        require_magic(checkpoint.name, checkpoint.gguf)
        return Footprint(file_bytes=checkpoint.gguf.stat().st_size)
    folder = Path(checkpoint.source)
    config = configuration_of(checkpoint)
    if config is None:
        return None
    files = weight_files(folder)
    if not files:
        raise ModelError(
            f"model {checkpoint.name} has no weights; fetch its *.safetensors or *.bin files into the directory"
        )
    return Footprint(sum(map(_num_elements, files)), sum(file.stat().st_size for file in files), _kv_per_token(config))


def configuration_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Read the config.json of a model in a directory; None for any other.

    Raises:
        ModelError: It is no JSON object, or has impossible sizes.
    """
    folder, name = Path(checkpoint.source), checkpoint.name
    if checkpoint.gguf is not None or not folder.is_dir():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot load model {name}: config.json is not valid JSON ({error}); fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"cannot load model {name}: config.json is no JSON object; fetch it again")
    require_sizes(name, config)
    return config


def _num_elements(file: Path) -> int:
    """Return the number of elements in a safetensors file by its header; 0 without a readable one."""
    try:
        return sum(_sizes(file))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, struct.error):
        return 0  # what is wrong with it is said by who loads it


def _sizes(file: Path) -> Iterator[int]:
    if file.suffix != ".safetensors":
        return
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LARGEST_HEADER:
            return
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield math.prod(tensor["shape"])


def _kv_per_token(config: dict[str, Any]) -> int:
    """Elements of keys and values of one token, by the names that configurations of decoders share."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return int(2 * _num_attention_layers(config) * (config.get("num_key_value_heads") or heads) * head_dim)
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return 0


def _num_attention_layers(config: dict[str, Any]) -> int:
    """Layers with K/V, by the names under which configurations say which of theirs are no attention layers."""
    for name in ("layer_types", "layers_block_type"):
        types = config.get(name)
        if isinstance(types, list) and types:
            return sum(kind not in _WITHOUT_KV for kind in types)
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        if isinstance(config.get(name), list):
            return len(config[name])
    pattern = config.get("hybrid_override_pattern")  # Nemotron-H
    if isinstance(pattern, str):
        return pattern.count("*")
    count = int(config["num_hidden_layers"])
    if config.get("full_attention_interval"):  # Qwen3-Next, Qwen3.5
        return count // int(config["full_attention_interval"])
    if config.get("attn_layer_period"):  # Jamba
        return len(range(config.get("attn_layer_offset", 0), count, config["attn_layer_period"]))
    return count
