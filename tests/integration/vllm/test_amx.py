"""K/V in the tiles of AMX: packed by vLLM's own operation, which needs no AMX, in an engine that attends without it."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from engines import BLOCK, engine, text
from kvgraft.integrations.vllm.codec import choose_codec
from kvgraft.integrations.vllm.codec.amx import PairedTilesCodec
from kvgraft.integrations.vllm.codec.cpu import TransposedKeysCodec

HEADS = 3


def packs(isa):
    """How vLLM's operation for `isa` writes into a cache."""
    current_platform.import_kernels()

    def write(keys, values, cache, slots):
        num_blocks, num_heads, block_size, _ = cache.shape
        halves = cache.view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    return write


def packs_8_bits(isa, name):
    """The same of 8 bits: the operation takes bfloat16 and a cache of bytes."""

    def write(numbers_of_keys, numbers_of_values, cache, slots):
        num_blocks, num_heads, block_size, _ = cache.shape
        halves = cache.view(torch.uint8).view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)
        keys, values = (numbers.float().bfloat16() for numbers in (numbers_of_keys, numbers_of_values))
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=name)

    return write


@pytest.fixture(scope="module")
def packs_tiles():
    """vLLM's operation packs tiles; which of its builds is loaded is the processor's matter, and that for AVX2 cannot."""
    one = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    try:
        packs("amx")(one, one, torch.zeros(1, 1, 32, 64, dtype=torch.bfloat16), torch.tensor([0]))
    except RuntimeError as error:
        assert "Unsupported CPU attention" in str(error)  # noqa: PT017 - anything else is a failure
        pytest.skip("what vLLM loads on this processor packs no tiles")


@pytest.mark.parametrize(("isa", "kind"), [("amx", PairedTilesCodec), ("vec", TransposedKeysCodec)])
@pytest.mark.parametrize(("block_size", "dim"), [(32, 32), (64, 128), (128, 64), (32, 256)])
def test_what_vllm_packs_is_found_and_read(isa, kind, block_size, dim, request):
    if isa == "amx":
        request.getfixturevalue("packs_tiles")
    cache = torch.zeros(3, HEADS, block_size, 2 * dim, dtype=torch.bfloat16)
    codec = choose_codec(cache, HEADS, dim, block_size, packs(isa))
    assert isinstance(codec, kind)
    slots = torch.randperm(3 * block_size)[: 2 * block_size]
    keys, values = torch.randn(2, len(slots), HEADS, dim).bfloat16()
    packs(isa)(keys, values, cache, slots)
    assert all(torch.equal(*pair) for pair in zip(codec.read(cache, slots), (keys, values), strict=True))


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize(("block_size", "dim"), [(32, 32), (128, 64)])
def test_8_bits_in_tiles_are_found_and_read(name, dtype, block_size, dim, packs_tiles):
    cache = torch.zeros(3, HEADS, block_size, 2 * dim, dtype=dtype)
    codec = choose_codec(cache, HEADS, dim, block_size, packs_8_bits("amx", name))
    assert isinstance(codec, PairedTilesCodec)


def unpacked(key_tiles, value_tiles):
    """K/V halves of a cache, packed in tiles, as the kernel without AMX has them; by no code of ours."""
    num_blocks, num_heads, block_size, dim = key_tiles.shape
    cache = torch.empty(num_blocks, num_heads, 2 * block_size, dim, dtype=key_tiles.dtype)
    keys, values = cache.chunk(2, dim=2)
    tiles = key_tiles.reshape(num_blocks, num_heads, block_size // 16, dim // 2, 16, 2)
    keys.copy_(tiles.permute(0, 1, 3, 5, 2, 4).reshape(num_blocks, num_heads, block_size, dim))
    tiles = value_tiles.reshape(num_blocks, num_heads, dim // 16, block_size // 2, 16, 2)
    values.copy_(tiles.permute(0, 1, 3, 5, 2, 4).reshape(num_blocks, num_heads, block_size, dim))
    return keys, values


@pytest.fixture(scope="module")
def tiled(model_folder, packs_tiles):
    """An engine whose cache is in tiles."""
    attend = ops.cpu_attention_with_kv_cache

    def attend_unpacked(*, key_cache, value_cache, **others):
        keys, values = unpacked(key_cache, value_cache)
        attend(key_cache=keys, value_cache=values, **others)

    def pack_in_tiles(builder, layer_names):
        layers = cpu_attn.get_layers_from_vllm_config(builder.vllm_config, cpu_attn.Attention, layer_names)
        for layer in layers.values():
            layer.isa = "amx"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "cpu_attention_with_kv_cache", attend_unpacked)
        patch.setattr(cpu_attn.CPUAttentionMetadataBuilder, "_set_isa_to_layers", pack_in_tiles)
        patch.setattr(cpu_attn, "_get_attn_isa", lambda *args: "vec")
        with engine(model_folder, dtype="bfloat16", block_size=BLOCK, num_gpu_blocks_override=100) as one:
            yield one


def test_a_document_in_tiles_is_moved(tiled):
    document = text(1, 400)
    tiled.donate(text(2, 40) + document + text(3, 20))
    answer = tiled.ask(text(4, 90) + document + text(5, 20))
    assert tiled.worker.refusal == ""
    assert tiled.worker.description["kv_layouts"] == [PairedTilesCodec.name]
    assert answer.shifted > 300
    assert answer.report["recomputed_tokens"] > 0


def test_gaps_in_tiles_are_computed_as_vllm_computes_them(tiled):
    """An exact front with a text between: nothing is moved, and rounding alone is left."""
    document, question = text(6, 300), text(7, 60)
    tiled.donate(document + text(8, 30))
    prompt = document + question
    cold = tiled.cold(prompt)
    answer = tiled.ask(prompt)
    assert answer.report["exact_tokens"] >= 256
    answer.assert_like(cold, tolerance=0.05)
    tiled.check()
