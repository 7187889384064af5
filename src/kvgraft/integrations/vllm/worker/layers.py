"""The attention layers of this rank, group by group: specification, cache tensor, codec, metadata builder."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config

from kvgraft.integrations.vllm.codec import choose_codec
from kvgraft.integrations.vllm.worker.attention_layer import AttentionLayer, engine_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

    from kvgraft.integrations.vllm.codec import KVCodec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
        first_layer: Number of the first layer among all, group by group: the order of `KVBlock`s.
        layers: In the order of the model.
        builders: Metadata builders, each with the names of its layers; our own, for the runner's keep buffers of its batch.
        block_size: Tokens of a block of the backend.
        window: Tokens that a position attends to, itself included; 0 for all.
        split: Blocks of the backend in one of vLLM's block tables: a backend may take smaller ones.
    """

    first_layer: int
    layers: tuple[AttentionLayer, ...]
    builders: tuple[tuple[Any, tuple[str, ...]], ...]
    block_size: int
    window: int
    split: int = 1

    def own_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the blocks of the backend that `blocks` of vLLM's table consist of; what is 0, no block, stays so."""
        if self.split == 1:
            return blocks
        parts = blocks[:, None] * self.split + np.arange(self.split, dtype=np.int32)
        return np.where(blocks[:, None] != 0, parts, 0).astype(np.int32).reshape(-1)


def layer_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Tensor]
) -> tuple[LayerGroup, ...]:
    """Describe all layers, and prove the layout of each distinct one.

    Raises:
        IntegrationError: A layer's layout is unknown; nothing may be grafted.
    """
    modules = vllm_config.compilation_config.static_forward_context
    order = {name: number for number, name in enumerate(kv_caches)}
    codecs: dict[tuple[object, ...], KVCodec] = {}
    groups: list[LayerGroup] = []
    for group in kv_cache_config.kv_cache_groups:
        names = sorted(group.layer_names, key=order.__getitem__)
        layers = tuple(_layer(name, modules[name], kv_caches[name], _spec_of(group, name), codecs) for name in names)
        spec = layers[0].spec
        groups.append(
            LayerGroup(
                sum(len(earlier.layers) for earlier in groups),
                layers,
                _builders(vllm_config, layers),
                spec.block_size,
                int(getattr(spec, "sliding_window", 0) or 0),
                _spec_of(group, names[0]).block_size // spec.block_size,
            )
        )
    _share_workspace([builder for group in groups for builder, _ in group.builders])
    return tuple(groups)


@contextmanager
def caches_bound(layers: Sequence[AttentionLayer], caches: Sequence[Tensor]) -> Iterator[None]:
    """Bind `caches` to the layers while the block runs forward passes, instead of the paged ones."""
    kept = [layer.module.kv_cache for layer in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer.module.kv_cache = cache
    try:
        yield
    finally:
        for layer, cache in zip(layers, kept, strict=True):
            layer.module.kv_cache = cache


def _layer(
    name: str,
    module: Any,  # noqa: ANN401 - vLLM's Attention
    cache: Tensor,
    spec: AttentionSpec,
    codecs: dict[tuple[object, ...], KVCodec],
) -> AttentionLayer:
    spec = _in_blocks_of(cache, spec)
    layout = (type(module.impl), tuple(cache.shape), cache.stride(), cache.dtype, spec.block_size)
    if cache.dtype == torch.uint8:
        from kvgraft.integrations.vllm.worker.float8_layer import Float8Layer, float8_codec, float8_type

        number = float8_type(module)
        if (layout, number) not in codecs:
            codecs[layout, number] = float8_codec(cache.view(number), module, spec)
        return Float8Layer(name, module, cache, spec, codecs[layout, number], number)
    if layout not in codecs:
        store = partial(engine_write, module)
        codecs[layout] = choose_codec(cache, spec.num_kv_heads, spec.head_size, spec.block_size, store)
    return AttentionLayer(name, module, cache, spec, codecs[layout])


def _in_blocks_of(cache: Tensor, spec: AttentionSpec) -> AttentionSpec:
    """Return the specification in blocks of the backend, which every layout has in its third dimension.

    A wrong idea of them would not pass the check of the layout.
    """
    size = cache.shape[2] if cache.ndim > 3 else spec.block_size
    if size >= spec.block_size or spec.block_size % size:
        return spec
    found: AttentionSpec = spec.copy_with_new_block_size(size)
    return found


def _share_workspace(builders: Sequence[Any]) -> None:
    """Let builders that have a workspace (FlashInfer's: 394 MiB) share one, made now, as vLLM does among its own.

    Passes of all groups follow one another on one stream.
    """
    makers = [builder for builder in builders if hasattr(builder, "_get_workspace_buffer")]
    if not makers:
        return
    workspace = makers[0]._get_workspace_buffer()
    logger.info("kvgraft takes %d MiB of device memory for the attention backend", workspace.nbytes >> 20)
    for builder in makers[1:]:
        builder.set_workspace_buffer(workspace)


def _spec_of(group: Any, name: str) -> AttentionSpec:  # noqa: ANN401 - vLLM's KVCacheGroupSpec
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)


def _builders(vllm_config: VllmConfig, layers: Sequence[AttentionLayer]) -> tuple[tuple[Any, tuple[str, ...]], ...]:
    """Return one builder per backend and specification, as vLLM's runner groups them."""
    kinds: dict[tuple[object, AttentionSpec], list[str]] = {}
    for layer in layers:
        kinds.setdefault((layer.module.get_attn_backend(), layer.spec), []).append(layer.name)
    with set_current_vllm_config(vllm_config):
        return tuple(
            (backend.get_builder_cls()(spec, names, vllm_config, layers[0].cache.device), tuple(names))  # type: ignore[attr-defined]
            for (backend, spec), names in kinds.items()
        )
