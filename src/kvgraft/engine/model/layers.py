"""Attention layers of a transformers model (heads, head size, window), and which can be served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.errors import ModelError
from kvgraft.fidelity import cache_of
from kvgraft.memory.pool import LayerShape
from kvgraft.windows import ChunkedWindow, SlidingWindow, WindowKind, widest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_CHUNKED = "chunked_attention"
"""transformers' name in `layer_types`."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The attention layers of a model, in order.

    Attributes:
        shapes: K/V heads and head size.
        windows: Which keys a row sees; None for all up to its own.
        has_sinks: Whether heads have attention sinks.
    """

    shapes: tuple[LayerShape, ...]
    windows: tuple[WindowKind | None, ...]
    has_sinks: bool = False

    @property
    def window(self) -> WindowKind | None:
        """Reach of window layers, of several sliding windows the widest; None if no layer has a window."""
        return widest(self.windows)

    @property
    def is_all_swa(self) -> bool:
        """Return whether every layer has a window."""
        return None not in self.windows

    def bytes_per_token(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of one token in all full-attention layers, and in all window layers."""
        sizes = [0, 0]
        for shape, window in zip(self.shapes, self.windows, strict=True):
            sizes[window is not None] += 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        return sizes[0], sizes[1]


def layer_window(config: PreTrainedConfig | None, layer: int, sliding_window: int | None) -> WindowKind | None:
    """Return which keys a row of a layer sees; None for all up to its own.

    Args:
        config: That the layer was built from, if it kept it.
        layer: Number of the layer.
        sliding_window: What the layer itself says. Of chunks it says nothing: its mask would.
    """
    if sliding_window:
        return SlidingWindow(sliding_window)
    types = getattr(config, "layer_types", None)
    if config is None or not types or types[layer] != _CHUNKED:
        return None
    return ChunkedWindow(config.attention_chunk_size)


def unsupported_attention(model: PreTrainedModel) -> str | None:
    """Name what keeps K/V of this model from being slots of keys and values, or return None."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return f"model type {config.model_type!r} is an encoder-decoder"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) is not supported yet"
    types = set(getattr(config, "layer_types", None) or ())
    other = types - {"full_attention", "sliding_attention", _CHUNKED}
    if other:
        return f"layers of type {', '.join(sorted(other))} are not supported yet"
    if _CHUNKED in types and not getattr(config, "attention_chunk_size", None):
        return "the configuration has layers of chunked attention and no attention_chunk_size"
    if getattr(config, "num_kv_shared_layers", 0):
        return "layers that share K/V with other layers are not supported yet"
    return None


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Return K/V heads and head size of each layer, read off the cache of a one-token forward pass.

    Raises:
        ModelError: The model's cache is not one pair of equally shaped keys and values per layer.
    """
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    cache = cache_of(model(input_ids=token, use_cache=True))
    shapes = []
    for layer in getattr(cache, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape != values.shape or keys.ndim != 4:
            raise ModelError(
                f"model type {model.config.model_type!r} does not keep keys and values of one shape per layer; "
                "choose another model"
            )
        shapes.append(LayerShape(keys.shape[1], keys.shape[3]))
    if not shapes:
        raise ModelError(
            f"model type {model.config.model_type!r} keeps no K/V cache; choose a decoder with attention layers"
        )
    return shapes
