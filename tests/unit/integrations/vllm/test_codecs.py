"""KV codecs against writers that follow the documented layouts. No engine: only shapes and strides."""

from __future__ import annotations

import pytest
import torch

from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.codec import choose_codec, scratch_like
from kvgraft.integrations.vllm.codec.amx import PairedTilesCodec
from kvgraft.integrations.vllm.codec.cpu import TransposedKeysCodec
from kvgraft.integrations.vllm.codec.packed import PackedCodec
from kvgraft.integrations.vllm.codec.scratch import scratch_laid_out_as
from kvgraft.integrations.vllm.codec.split import SplitCodec

BLOCKS, HEADS, BLOCK, DIM = 6, 3, 16, 8


def packed_write(keys, values, cache, slots):
    """FlashAttention and FlashInfer of vLLM 0.28 to 0.32: token by token into (blocks, block, heads, dim) views."""
    key_cache, value_cache = cache.transpose(1, 2).split(DIM, dim=-1)
    for row, slot in enumerate(slots.tolist()):
        key_cache[slot // BLOCK, slot % BLOCK] = keys[row]
        value_cache[slot // BLOCK, slot % BLOCK] = values[row]


def cpu_write(keys, values, cache, slots):
    """CPU attention: keys transposed in the first half of a block and head, values in the second."""
    flat = cache.view(-1)
    for row, slot in enumerate(slots.tolist()):
        for head in range(HEADS):
            start = (slot // BLOCK * HEADS + head) * 2 * BLOCK * DIM
            for channel in range(DIM):
                flat[start + channel * BLOCK + slot % BLOCK] = keys[row, head, channel]
                flat[start + BLOCK * DIM + slot % BLOCK * DIM + channel] = values[row, head, channel]


def split_write(axis):
    def write(keys, values, cache, slots):
        key_cache, value_cache = cache.unbind(axis)
        for row, slot in enumerate(slots.tolist()):
            key_cache[slot // BLOCK, slot % BLOCK] = keys[row]
            value_cache[slot // BLOCK, slot % BLOCK] = values[row]

    return write


def hnd():
    return torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)


def nhd():
    return torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).permute(0, 2, 1, 3)


CASES = {
    "packed HND": (hnd, packed_write, PackedCodec),
    "packed NHD": (nhd, packed_write, PackedCodec),
    "CPU": (hnd, cpu_write, TransposedKeysCodec),
    "halves outermost": (lambda: torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM), split_write(0), SplitCodec),
    "halves within blocks": (lambda: torch.zeros(BLOCKS, 2, BLOCK, HEADS, DIM), split_write(1), SplitCodec),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_codec_that_fits_is_found_and_reads_and_writes_as_the_engine(case, dtype):
    make, engine_write, kind = CASES[case]
    cache = make().to(dtype)
    codec = choose_codec(cache, HEADS, DIM, BLOCK, engine_write)
    assert isinstance(codec, kind)
    assert not cache.any(), "the check runs on scratch blocks"
    slots = torch.tensor([0, 5, 17, 95, 31, 32])
    keys, values = torch.randn(2, 6, HEADS, DIM).to(dtype)
    engine_write(keys, values, cache, slots)
    read = codec.read(cache, slots)
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)
    by_codec = scratch_like(cache, BLOCKS, codec.block_axis)
    codec.write(by_codec, slots, keys, values)
    assert torch.equal(by_codec, cache)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_8_bits_are_found_read_and_written(case, dtype):
    make, engine_write, kind = CASES[case]
    cache = make().to(dtype)
    codec = choose_codec(cache, HEADS, DIM, BLOCK, engine_write)
    assert isinstance(codec, kind)
    with pytest.raises(IntegrationError, match="--kv-cache-dtype auto"):
        choose_codec(cache, HEADS, DIM, BLOCK, lambda keys, values, *to: engine_write(values, keys, *to))


def amx_write(block, dim):
    """CPU attention with AMX: a tile is 16 rows of 16 pairs; keys pair channels of 16 tokens, values pair tokens."""

    def write(keys, values, cache, slots):
        flat = cache.view(-1)
        for row, slot in enumerate(slots.tolist()):
            offset = slot % block
            for head in range(HEADS):
                start = (slot // block * HEADS + head) * 2 * block * dim
                for channel in range(dim):
                    at = offset // 16 * 16 * dim + channel // 2 * 32 + offset % 16 * 2 + channel % 2
                    flat[start + at] = keys[row, head, channel]
                    at = channel // 16 * 16 * block + offset // 2 * 32 + channel % 16 * 2 + offset % 2
                    flat[start + block * dim + at] = values[row, head, channel]

    return write


@pytest.mark.parametrize(("block", "dim"), [(32, 32), (64, 32), (32, 64), (128, 64)])
def test_tiles_of_amx_are_read_and_written_as_the_engine_does(block, dim):
    cache, engine_write = torch.zeros(3, HEADS, block, 2 * dim, dtype=torch.bfloat16), amx_write(block, dim)
    codec = choose_codec(cache, HEADS, dim, block, engine_write)
    assert isinstance(codec, PairedTilesCodec)
    slots = torch.randperm(3 * block)[: block + 5]
    keys, values = torch.randn(2, len(slots), HEADS, dim).bfloat16()
    engine_write(keys, values, cache, slots)
    assert all(torch.equal(*pair) for pair in zip(codec.read(cache, slots), (keys, values), strict=True))
    by_codec = scratch_like(cache, 3, codec.block_axis)
    codec.write(by_codec, slots, keys, values)
    assert torch.equal(by_codec, cache)


def test_float32_and_widths_that_fill_no_tile_are_not_taken_for_tiles():
    codec = PairedTilesCodec()
    assert codec.matches(torch.zeros(2, HEADS, 32, 64, dtype=torch.bfloat16), HEADS, 32, 32)
    assert not codec.matches(torch.zeros(2, HEADS, 32, 64), HEADS, 32, 32)
    assert not codec.matches(torch.zeros(2, HEADS, 48, 64, dtype=torch.bfloat16), HEADS, 32, 48)
    assert not codec.matches(torch.zeros(2, HEADS, 32, 160, dtype=torch.bfloat16), HEADS, 80, 32)


def test_a_layout_that_differs_in_one_token_of_a_block_is_refused():
    def differs(keys, values, cache, slots):
        packed_write(keys, values, cache, torch.where(slots % BLOCK == 9, slots - 2, slots))

    with pytest.raises(IntegrationError, match="unknown KV cache layout"):
        choose_codec(hnd(), HEADS, DIM, BLOCK, differs)


@pytest.mark.parametrize(("dtype", "remedy"), [(torch.bfloat16, "--dtype float32"), (torch.float32, "please report")])
def test_the_refusal_names_a_remedy(dtype, remedy):
    def swizzled(keys, values, cache, slots):
        packed_write(keys.flip(-1), values, cache, slots)

    with pytest.raises(IntegrationError, match=remedy):
        choose_codec(hnd().to(dtype), HEADS, DIM, BLOCK, swizzled)


def test_a_layout_that_no_codec_reads_is_refused():
    def swizzled(keys, values, cache, slots):
        packed_write(keys.flip(-1), values, cache, slots)

    with pytest.raises(IntegrationError, match=r"unknown KV cache layout.*nothing is grafted"):
        choose_codec(hnd(), HEADS, DIM, BLOCK, swizzled)


def test_a_shape_that_no_codec_knows_is_refused():
    with pytest.raises(IntegrationError, match="unknown KV cache layout"):
        choose_codec(torch.zeros(BLOCKS, BLOCK, 99), HEADS, DIM, BLOCK, packed_write)


LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's physical orders of layer, block, head, token and content."""
LAYERS = 3


def laid_out(layout, num_heads, block, dim=DIM):
    """All the memory of a cache, and the view of its middle layer that vLLM hands over."""
    order = LAYOUTS[layout]
    sizes = (LAYERS, BLOCKS, num_heads, block, 2 * dim)
    memory = torch.zeros([sizes[axis] for axis in order])
    return memory, memory.permute([order.index(axis) for axis in range(5)])[1]


def by_strides(block, dim=DIM):
    """How kernels for paged caches write: wherever the strides of keys and values say."""

    def write(keys, values, cache, slots):
        halves = cache.transpose(1, 2).split(dim, dim=-1)
        for half, given in zip(halves, (keys, values), strict=True):
            half[slots // block, slots % block] = given

    return write


@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("num_heads", [1, 2, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_physical_layout_is_read_and_written_as_the_engine_does(layout, num_heads, block):
    memory, cache = laid_out(layout, num_heads, block)
    codec = choose_codec(cache, num_heads, DIM, block, by_strides(block))
    assert not memory.any(), "the check runs on scratch blocks"
    slots = torch.randperm(BLOCKS * block)[: 2 * block + 3]
    keys, values = torch.randn(2, len(slots), num_heads, DIM)
    by_strides(block)(keys, values, cache, slots)
    assert all(torch.equal(*pair) for pair in zip(codec.read(cache, slots), (keys, values), strict=True))
    by_codec, own = laid_out(layout, num_heads, block)
    codec.write(own, slots, keys, values)
    assert torch.equal(by_codec, memory), "nothing of other layers is touched"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_are_the_same_in_blocks_of_the_backend_that_are_smaller(layout):
    """A block of 256 tokens may be four of the backend's; only dense blocks are cut, and vLLM counts slots in tokens."""
    _, cache = laid_out(layout, 2, 64)
    codec = choose_codec(cache, 2, DIM, 64, by_strides(64))
    slots = torch.tensor([0, 63, 64, 255, 256, 300])
    keys, values = torch.randn(2, len(slots), 2, DIM)
    by_strides(64)(keys, values, cache, slots)
    assert all(torch.equal(*pair) for pair in zip(codec.read(cache, slots), (keys, values), strict=True))


def halves_in_place_of_heads(keys, values, cache, slots):
    """With two heads `(blocks, 2, block, 2 * dim)` is also keys, then values, of all heads side by side."""
    for half, given in zip(cache.unbind(1), (keys, values), strict=True):
        half[slots // BLOCK, slots % BLOCK] = given.flatten(1)


def values_first(keys, values, cache, slots):
    by_strides(BLOCK)(values, keys, cache, slots)


def heads_within_content(keys, values, cache, slots):
    """Channels of both heads in turns."""
    mixed = torch.stack([keys, values], 1).permute(0, 3, 1, 2).reshape(len(slots), 2, 2 * DIM)
    cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK] = mixed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", [halves_in_place_of_heads, values_first, heads_within_content])
def test_another_reading_of_the_same_four_numbers_is_refused(layout, other):
    _, cache = laid_out(layout, 2, BLOCK)
    assert cache.shape == (BLOCKS, 2, BLOCK, 2 * DIM)
    with pytest.raises(IntegrationError, match="unknown KV cache layout"):
        choose_codec(cache, 2, DIM, BLOCK, other)


def as_if_dense(keys, values, cache, slots):
    """An operation that takes its blocks for one dense piece of memory, whatever the strides say."""
    flat = cache.as_strided((cache.shape[0] * cache[0].numel(),), (1,), cache.storage_offset())
    by_strides(BLOCK)(keys, values, flat.view(cache.shape), slots)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "BHLNC"])
def test_an_operation_that_would_write_over_pages_of_other_layers_is_refused(layout):
    _, cache = laid_out(layout, 2, BLOCK)
    with pytest.raises(IntegrationError, match="unknown KV cache layout"):
        choose_codec(cache, 2, DIM, BLOCK, as_if_dense)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_sees_the_strides_of_the_cache(layout):
    memory, cache = laid_out(layout, 2, BLOCK)
    all_of_it, scratch = scratch_laid_out_as(cache, 2, 0)
    assert scratch.shape == (2, *cache.shape[1:])
    outside = [axis for axis in range(4) if cache.stride(axis) > cache.stride(0)]
    expected = [cache.stride(axis) // (BLOCKS // 2 if axis in outside else 1) for axis in range(4)]
    assert list(scratch.stride()) == expected
    assert len(all_of_it) <= memory.numel() * 2 // BLOCKS
    scratch += torch.arange(scratch.numel()).view(scratch.shape)
    assert len(scratch.unique()) == scratch.numel(), "no two elements share memory"


@pytest.mark.parametrize("make", [hnd, nhd])
def test_scratch_blocks_lie_in_memory_as_the_cache_does(make):
    scratch = scratch_like(make(), 2, 0)
    assert scratch.shape[0] == 2
    assert scratch.stride()[1:] == make().stride()[1:]
