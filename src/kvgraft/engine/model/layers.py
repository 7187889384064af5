"""Layers of a transformers model (heads, head size and window, or the state they keep), and which can be served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import cache_utils

from kvgraft.engine.model.mixers import StatePlace, state_places
from kvgraft.errors import ModelError
from kvgraft.memory.pool import LayerShape
from kvgraft.model_cache import cache_of
from kvgraft.windows import ChunkedWindow, SlidingWindow, WindowKind, widest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvgraft.engine.model.mixers import Mixer
    from kvgraft.memory.state_pool import StatePart

_CHUNKED = "chunked_attention"
"""transformers' name in `layer_types`."""
_WITH_STATES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""transformers' names in `layer_types` of layers that keep a state, alone or beside K/V."""
_WITHOUT_ANYTHING = frozenset({"moe", "mlp"})
"""transformers' names in `layer_types` of layers that keep nothing."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The attention layers of a model, in order, and its layers with a state.

    Attributes:
        shapes: K/V heads and head size of each attention layer.
        windows: Which keys a row of it sees; None for all up to its own.
        has_sinks: Whether heads have attention sinks.
        numbers: Number of each attention layer among all layers of the model; empty where every layer is one.
        mixers: The modules that keep a state; a layer may have one beside its attention.
    """

    shapes: tuple[LayerShape, ...]
    windows: tuple[WindowKind | None, ...]
    has_sinks: bool = False
    numbers: tuple[int, ...] = ()
    mixers: tuple[Mixer, ...] = ()

    @property
    def window(self) -> WindowKind | None:
        """Reach of window layers, of several sliding windows the widest; None if no layer has a window."""
        return widest(self.windows)

    @property
    def is_all_swa(self) -> bool:
        """Return whether every layer has a window."""
        return None not in self.windows

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """Tensors of one sequence's state in all layers that keep one; empty for a model of attention layers alone."""
        return tuple(place.part for mixer in self.mixers for place in mixer.places)

    @property
    def chunk_size(self) -> int:
        """Tokens of the longest chunk in which a mixer computes; 0 without mixers."""
        return max((mixer.chunk_size for mixer in self.mixers), default=0)

    @property
    def num_recurrent_elements(self) -> int:
        """Elements of one sequence's recurrent states, which every token changes."""
        places = (place for mixer in self.mixers for place in mixer.places)
        return sum(math.prod(place.part.shape) for place in places if place.is_recurrent)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one sequence's state in all layers that keep one."""
        return sum(part.num_bytes for part in self.state_parts)

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
    if getattr(config, "num_kv_shared_layers", 0):
        return "layers that share K/V with other layers are not supported yet"
    return _unsupported_types(config)


def _unsupported_types(config: PreTrainedConfig) -> str | None:
    types = set(getattr(config, "layer_types", None) or ())
    other = types - {"full_attention", "sliding_attention", _CHUNKED} - _WITH_STATES - _WITHOUT_ANYTHING
    if other:
        return f"layers of type {', '.join(sorted(other))} are not supported yet"
    if types & _WITH_STATES and not hasattr(cache_utils, "LinearAttentionLayer"):
        return f"layers of type {', '.join(sorted(types & _WITH_STATES))} need transformers 5.23 or newer"
    if _CHUNKED in types and not getattr(config, "attention_chunk_size", None):
        return "the configuration has layers of chunked attention and no attention_chunk_size"
    return None


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """What a model keeps of one sequence, by its own cache; keys are numbers of layers.

    Attributes:
        shapes: Heads and head size of layers with K/V.
        states: Parts of the state of layers with one.
    """

    shapes: dict[int, LayerShape]
    states: dict[int, tuple[StatePlace, ...]]


@torch.inference_mode()
def cached_layers(model: PreTrainedModel) -> CachedLayers:
    """Return what each layer keeps, read off the cache of a one-token forward pass.

    Raises:
        ModelError: A layer keeps something else than one pair of equally shaped keys and values, or a state.
    """
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    cache = cache_of(model(input_ids=token, use_cache=True))
    found = CachedLayers({}, {})
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if places := state_places(layer):
            found.states[number] = places
        if keys is None and values is None and (places or _keeps_nothing(model, number)):
            continue
        if keys is None or values is None or keys.shape != values.shape or keys.ndim != 4:
            raise ModelError(
                f"model type {model.config.model_type!r} does not keep keys and values of one shape per layer; "
                "choose another model"
            )
        found.shapes[number] = LayerShape(keys.shape[1], keys.shape[3])
    if not found.shapes:
        raise ModelError(
            f"model type {model.config.model_type!r} keeps no K/V cache; choose a decoder with attention layers"
        )
    return found


def _keeps_nothing(model: PreTrainedModel, number: int) -> bool:
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return number < len(types) and types[number] in _WITHOUT_ANYTHING
