"""Rows of tokens: all layers of a token side by side, in place, and what their checksums tell apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import StoreError
from kvgraft.memory import KVBlock
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.layout import Field, RowLayout

KEY = "ab" * 16


def block_of(num_tokens, shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pairs = [[torch.randn((num_tokens, *shape), generator=generator).to(dtype) for shape in pair] for pair in shapes]
    return KVBlock(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "shapes",
    [
        [((2, 4), (2, 4))],
        [((1, 3), (2, 5)), ((3, 1), (1, 1))],  # rows whose fields do not end where the next may begin
        [((1, 0), (1, 7))],  # latent attention has no values of its own
    ],
)
def test_what_is_packed_is_unpacked_bit_by_bit(dtype, shapes):
    block = block_of(5, shapes, dtype)
    layout = RowLayout.of(block, "rope")
    rows = layout.pack(block)
    assert rows.shape == (5, layout.bytes_per_token)
    found = layout.unpack(rows)
    for one, other in zip((*found.keys, *found.values), (*block.keys, *block.values), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    assert np.array_equal(layout.pack(found), rows)


def test_a_span_is_one_range():
    block = block_of(9, [((2, 4), (2, 4)), ((1, 4), (1, 6))])
    layout = RowLayout.of(block)
    rows = layout.pack(block)
    part = layout.unpack(rows[3:7])
    assert torch.equal(part.keys[1], block.keys[1][3:7])
    assert torch.equal(part.values[0], block.values[0][3:7])


def test_unpacking_copies_nothing():
    layout = RowLayout((Field(1, 4, torch.float32),) * 2)
    rows = np.zeros((3, layout.bytes_per_token), np.uint8)
    layout.unpack(rows).keys[0].fill_(1.0)
    assert rows.any()


def test_layers_follow_each_other_keys_first():
    layout = RowLayout(tuple(Field(1, width, torch.float32) for width in (1, 2, 3, 4)))
    assert layout.offsets == (0, 8, 16, 32, 48)
    assert layout.bytes_per_token == 48


def test_equal_layouts_have_equal_descriptions_and_others_have_not():
    base = RowLayout((Field(2, 4, torch.float32), Field(2, 4, torch.float32)), "r")
    assert base.description == RowLayout.of(block_of(1, [((2, 4), (2, 4))]), "r").description
    others = [
        RowLayout(base.fields, "other"),
        RowLayout(base.fields * 2, "r"),
        RowLayout((Field(4, 2, torch.float32), base.fields[1]), "r"),
        RowLayout((Field(2, 4, torch.bfloat16), base.fields[1]), "r"),
    ]
    assert len({layout.description for layout in (base, *others)}) == 5


def test_another_layout_is_refused():
    layout = RowLayout.of(block_of(1, [((2, 4), (2, 4))]))
    with pytest.raises(StoreError, match="another layout"):
        layout.pack(block_of(3, [((2, 4), (2, 4))], torch.bfloat16))


class TestChecksums:
    ROWS = np.random.default_rng(0).integers(0, 256, (600, 16), dtype=np.uint8)

    def test_a_page_has_the_same_wherever_the_read_began(self):
        whole = page_checksums(self.ROWS, KEY)
        assert len(whole) == 3
        assert np.array_equal(page_checksums(self.ROWS[256:], KEY, 1), whole[1:])
        assert np.array_equal(page_checksums(self.ROWS[512:], KEY, 2), whole[2:])

    def test_another_place_or_object_has_another(self):
        page = self.ROWS[:256]
        sums = {int(page_checksums(page, key, place)[0]) for key in (KEY, "cd" * 16, "f" * 32) for place in (0, 1, 7)}
        assert len(sums) == 9

    def test_any_bit_counts(self):
        whole = page_checksums(self.ROWS, KEY)
        for place, bit in ((0, 1), (255, 128), (300, 16)):
            changed = self.ROWS.copy()
            changed[place, place % 16] ^= bit
            assert np.flatnonzero(page_checksums(changed, KEY) != whole).tolist() == [place // 256]
