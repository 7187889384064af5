"""Find the codec of a layer by writing known K/V through the engine's own operation and reading them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvgraft.errors import IntegrationError
from kvgraft.graft.words import WORDS
from kvgraft.integrations.vllm.codec.base import is_float8
from kvgraft.integrations.vllm.codec.packed import PackedCodec
from kvgraft.integrations.vllm.codec.scratch import scratch_laid_out_as
from kvgraft.integrations.vllm.codec.split import SplitCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvgraft.integrations.vllm.codec.base import KVCodec

    EngineWrite = Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """Stores `(keys, values, cache, slots)` as the engine does."""


def choose_codec(
    cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int, engine_write: EngineWrite
) -> KVCodec:
    """Return the codec that reads what the engine writes, and writes what the engine would.

    Args:
        cache: The layer's cache; not touched, the check runs on scratch blocks of the same strides.
        num_kv_heads: Heads of this rank.
        head_dim: Width of a head.
        block_size: Tokens of a block.
        engine_write: The engine's own operation.

    Raises:
        IntegrationError: No codec does; nothing may be grafted.
    """
    for codec in _codecs(cache):
        if codec.matches(cache, num_kv_heads, head_dim, block_size):
            scratch = scratch_laid_out_as(cache, 2, codec.block_axis)
            if _is_right(codec, scratch, (num_kv_heads, head_dim), block_size, engine_write):
                return codec
    raise IntegrationError(
        f"unknown KV cache layout: shape {tuple(cache.shape)}, strides {cache.stride()}, {cache.dtype} on "
        f"{cache.device.type}; nothing is grafted, {_remedy(cache)}"
    )


def _codecs(cache: Tensor) -> tuple[KVCodec, ...]:
    """Return the codecs that a cache on its device may need; those of the CPU are loaded there alone."""
    packed, split = PackedCodec(), (SplitCodec(0), SplitCodec(1))
    if cache.device.type != "cpu":
        return (packed, *split)
    from kvgraft.integrations.vllm.codec.cpu import TransposedKeysCodec

    if cache.dtype != torch.bfloat16 and not is_float8(cache.dtype):  # others are not tiled
        return (packed, TransposedKeysCodec(), *split)
    from kvgraft.integrations.vllm.codec.amx import PairedTilesCodec

    return (packed, TransposedKeysCodec(), PairedTilesCodec(), *split)


def _remedy(cache: Tensor) -> str:
    report = "please report the attention backend"
    if is_float8(cache.dtype):
        return f"start with --kv-cache-dtype auto, or {report}"
    if cache.device.type == "cpu" and cache.dtype != torch.float32:
        return f"start with --dtype float32, which vLLM's CPU kernels lay out more simply, or {report}"
    return report


def _is_right(
    codec: KVCodec,
    scratch: tuple[Tensor, Tensor],
    shape: tuple[int, int],
    block_size: int,
    engine_write: EngineWrite,
) -> bool:
    """Compare both directions: at slots of two blocks that are not in order, then at all; nothing beside may change."""
    memory, cache = scratch
    generator = torch.Generator().manual_seed(7)
    some = torch.tensor([block_size + 1, 0, 2 * block_size - 1, 3, block_size])
    for chosen in (some, torch.randperm(2 * block_size, generator=generator)):
        slots = chosen.to(cache.device)
        keys, values = (_numbers((len(slots), *shape), generator).to(cache.device, cache.dtype) for _ in range(2))
        memory.zero_()
        engine_write(keys, values, cache, slots)
        by_engine = memory.clone()
        read_keys, read_values = codec.read(cache, slots)
        if not (_same_bits(read_keys, keys) and _same_bits(read_values, values)):
            return False
        memory.zero_()
        codec.write(cache, slots, keys, values)
        if not _same_bits(memory, by_engine):
            return False
    return True


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw numbers none of which becomes 0 in 8 bits, whose sign engines drop."""
    drawn = torch.randn(shape, generator=generator)
    return drawn + drawn.sign() / 8


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare tensors of one type; torch does not compare 8-bit numbers as such."""
    word = WORDS[one.element_size()]
    return torch.equal(one.contiguous().view(word), other.contiguous().view(word))
