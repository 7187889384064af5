"""What HostKVStore promises, compared with what was put, by example and in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import CapacityError, ConfigError, StoreError
from kvgraft.memory import HostKVStore, KVBlock, StoreKey

BYTES_PER_TOKEN = 2 * (2 * 3 * 4 + 1 * 2 * 2)
"""Of `make_block`: keys and values of two layers, two heads of three float32 and one head of two bfloat16."""

_SPECIAL = (float("nan"), float("-inf"), -0.0)
"""The first numbers of every block: what is kept bit for bit keeps them."""


def make_block(num_tokens: int, seed: int = 0) -> KVBlock:
    """Return a block whose layers differ in shape and precision, as those of real models do."""
    generator = torch.Generator().manual_seed(seed)

    def tensors() -> tuple[torch.Tensor, ...]:
        wide = torch.randn((num_tokens, 2, 3), generator=generator)
        narrow = torch.randn((num_tokens, 1, 2), generator=generator)
        if num_tokens:
            wide[0, 0] = torch.tensor(_SPECIAL)
        return wide, narrow.to(torch.bfloat16)

    return KVBlock(tensors(), tensors())


def assert_same(found: KVBlock, expected: KVBlock) -> None:
    """Compare shapes, types, place and every bit."""
    assert (found.num_layers, found.num_tokens) == (expected.num_layers, expected.num_tokens)
    for one, other in zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class TestHostKVStore:
    def make_store(self, budget_bytes: int) -> HostKVStore:
        return HostKVStore(budget_bytes)

    def test_a_new_store_is_empty(self) -> None:
        """It knows its budget and nothing else."""
        store = self.make_store(1000)
        assert (store.budget_bytes, store.used_bytes, len(store)) == (1000, 0, 0)
        assert 0 not in store
        store.check()

    @pytest.mark.parametrize("key", [0, -1, 1 << 62, "a", "a/b c", b"a", b"\0\xff"])
    def test_every_kind_of_key_names_a_block(self, key: StoreKey) -> None:
        """Whole numbers, texts and bytes, whatever characters are in them."""
        store, block = self.make_store(10_000), make_block(4)
        store.put(key, make_block(4))
        assert key in store
        assert_same(store.get(key), block)
        store.check()

    def test_keys_of_different_types_are_different(self) -> None:
        """What reads alike is not the same."""
        store = self.make_store(10_000)
        keys: list[StoreKey] = [1, "1", b"1"]
        for seed, key in enumerate(keys):
            assert key not in store
            store.put(key, make_block(2, seed))
        for seed, key in enumerate(keys):
            assert_same(store.get(key), make_block(2, seed))

    @pytest.mark.parametrize(("start", "length"), [(0, 6), (0, None), (2, None), (1, 3), (5, 1), (6, None), (3, 0)])
    def test_get_reads_a_span(self, start: int, length: int | None) -> None:
        """Also an empty one, and all behind `start` where no length is given."""
        store, block = self.make_store(10_000), make_block(6)
        store.put("x", make_block(6))
        assert_same(store.get("x", start, length), block.span(start, 6 - start if length is None else length))

    @pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 7), (6, 1), (7, None), (1, -1)])
    def test_a_span_outside_the_block_is_refused(self, start: int, length: int | None) -> None:
        """The store goes on as before."""
        store = self.make_store(10_000)
        store.put("x", make_block(6))
        with pytest.raises(ConfigError):
            store.get("x", start, length)
        assert_same(store.get("x"), make_block(6))

    def test_a_view_and_a_transposed_tensor_are_kept(self) -> None:
        """They are counted by their own bytes, not by those of the tensor that they show."""
        store, long = self.make_store(10_000), make_block(100)
        store.put(1, long.span(10, 2))
        turned = make_block(4).keys[0].transpose(1, 2)
        store.put(2, KVBlock((turned,), (turned,)))
        assert store.used_bytes == 2 * BYTES_PER_TOKEN + 2 * turned.nbytes
        assert_same(store.get(1), long.span(10, 2))
        assert_same(store.get(2), KVBlock((turned,), (turned,)))
        store.check()

    def test_the_budget_is_used_to_the_last_byte_and_no_further(self) -> None:
        """What does not fit is refused and changes nothing; what was removed makes room."""
        store = self.make_store(4 * BYTES_PER_TOKEN + 10)
        assert store.fits(4 * BYTES_PER_TOKEN + 10)
        store.put(1, make_block(4))
        assert store.used_bytes == 4 * BYTES_PER_TOKEN
        assert store.fits(10)
        assert not store.fits(11)
        with pytest.raises(CapacityError):
            store.put(2, make_block(1))
        assert (2 in store, len(store), store.used_bytes) == (False, 1, 4 * BYTES_PER_TOKEN)
        store.remove(1)
        store.put(2, make_block(4))
        assert (1 in store, len(store), store.used_bytes) == (False, 1, 4 * BYTES_PER_TOKEN)
        store.check()

    def test_a_store_without_budget_keeps_nothing(self) -> None:
        """Not even one token."""
        store = self.make_store(0)
        assert store.fits(0)
        with pytest.raises(CapacityError):
            store.put(1, make_block(1))
        store.check()

    def test_no_block_is_replaced(self) -> None:
        """A second one under the same key is refused; the first one stays."""
        store = self.make_store(10_000)
        store.put(1, make_block(3, seed=1))
        with pytest.raises(StoreError):
            store.put(1, make_block(3, seed=2))
        assert store.used_bytes == 3 * BYTES_PER_TOKEN
        assert_same(store.get(1), make_block(3, seed=1))
        store.check()

    def test_unknown_keys_are_refused(self) -> None:
        """Also those of blocks that were removed."""
        store = self.make_store(10_000)
        store.put(1, make_block(3))
        store.remove(1)
        for missing in (1, "never"):
            with pytest.raises(StoreError):
                store.get(missing)
            with pytest.raises(StoreError):
                store.remove(missing)
        assert (store.used_bytes, len(store)) == (0, 0)

    def test_what_was_read_outlives_its_removal(self) -> None:
        """Also if another block takes the key and the room."""
        store = self.make_store(3 * BYTES_PER_TOKEN)
        store.put(1, make_block(3, seed=1))
        span = store.get(1, 1, 2)
        store.remove(1)
        store.put(1, make_block(3, seed=2))
        assert_same(span, make_block(3, seed=1).span(1, 2))
        assert_same(store.get(1), make_block(3, seed=2))

    def test_two_stores_share_nothing(self) -> None:
        """Ranks of an engine have a store each, with the same keys."""
        one, other = self.make_store(10_000), self.make_store(10_000)
        one.put(1, make_block(3, seed=1))
        assert 1 not in other
        other.put(1, make_block(2, seed=2))
        one.remove(1)
        assert_same(other.get(1), make_block(2, seed=2))
        assert (one.used_bytes, other.used_bytes) == (0, 2 * BYTES_PER_TOKEN)

    @pytest.mark.parametrize("seed", range(5))
    def test_any_order_gives_what_a_dict_gives(self, seed: int) -> None:
        """Blocks are put, read and removed at random in a store that is often full."""
        rng, budget = np.random.default_rng(seed), 60
        store, kept = self.make_store(budget * BYTES_PER_TOKEN), dict[StoreKey, tuple[int, int]]()
        keys: list[StoreKey] = [0, 1, 2, 3, "a", b"a"]
        for step in range(200):
            key, num_tokens = keys[rng.integers(len(keys))], int(rng.integers(41))
            used = sum(length for length, _ in kept.values())
            if key not in kept and used + num_tokens <= budget:
                store.put(key, make_block(num_tokens, step))
                kept[key] = num_tokens, step
            elif key not in kept:
                with pytest.raises(CapacityError):
                    store.put(key, make_block(num_tokens, step))
            elif rng.integers(2):
                store.remove(key)
                del kept[key]
            store.check()
            assert store.used_bytes == sum(length for length, _ in kept.values()) * BYTES_PER_TOKEN
            assert [each in store for each in keys] == [each in kept for each in keys]
            for each, (length, put_at) in kept.items():
                start = int(rng.integers(length + 1))
                assert_same(store.get(each, start), make_block(length, put_at).span(start, length - start))
        assert len(store) == len(kept)
