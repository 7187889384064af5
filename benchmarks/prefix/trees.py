"""The trees under measurement behind one small interface; each takes tokens in the form its own engine keeps them."""

# ruff: noqa: ANN401 (each engine has tokens, slots and matches of its own)

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.prefix import RadixCache, RadixKey, frozen_tokens

if TYPE_CHECKING:
    from collections.abc import Callable


class Tree(ABC):
    """One prefix tree. `tokens` and `slots` are what `prepare` made of numpy arrays, outside the measured time."""

    @abstractmethod
    def prepare(self, token_ids: np.ndarray, slots: np.ndarray | None = None) -> tuple[Any, Any]:
        """Convert to the engine's own form."""

    def hand_over(self, tokens: Any) -> Any:
        """Tokens that the tree may keep as they are, where it makes a difference between them and others."""
        return tokens

    @abstractmethod
    def insert(self, tokens: Any, slots: Any) -> Any:
        """Store a prompt; its tokens may be kept as they are."""

    def insert_copy(self, tokens: Any, slots: Any) -> Any:
        """Store a prompt whose tokens the caller goes on writing to: a tree that does not copy them is given a copy."""
        return self.insert(tokens, slots)

    @abstractmethod
    def match(self, tokens: Any) -> Any:
        """Look a prompt up."""

    @abstractmethod
    def slots_of(self, match: Any) -> Any:
        """The slots of a match as one array."""

    @abstractmethod
    def length_of(self, match: Any) -> int:
        """Tokens matched."""

    @abstractmethod
    def lock_and_unlock(self, match: Any) -> None:
        """Pin a match and give it back."""

    @abstractmethod
    def evict(self, num_tokens: int) -> None:
        """Free tokens."""

    def insert_chunks(self, tokens: Any, slots: Any, chunk: int) -> None:
        """Store a prompt chunk by chunk, each chunk pinned as a running request would."""
        previous = None
        for end in range(chunk, len(tokens) + 1, chunk):
            self.insert(tokens[:end], slots[:end])
            previous = self.move_lock(previous, tokens[:end])

    @abstractmethod
    def move_lock(self, previous: Any, tokens: Any) -> Any:
        """Pin what is stored of `tokens` and give the pin of the chunk before back."""


class KVGraftTree(Tree):
    """`kvgraft.prefix.RadixCache`."""

    def __init__(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)

    def prepare(self, token_ids: np.ndarray, slots: np.ndarray | None = None) -> tuple[Any, Any]:
        """Numpy as it is."""
        return token_ids, slots

    def hand_over(self, tokens: Any) -> Any:
        """Tokens that nobody can write to."""
        return frozen_tokens(tokens)

    def insert(self, tokens: Any, slots: Any) -> Any:
        """Build the key and insert."""
        return self.cache.insert(RadixKey(tokens), slots)

    def match(self, tokens: Any) -> Any:
        """Build the key and match."""
        return self.cache.match_prefix(RadixKey(tokens))

    def slots_of(self, match: Any) -> Any:
        """Join the slots."""
        return match.kv_indices

    def length_of(self, match: Any) -> int:
        """Tokens matched."""
        return match.prefix_len

    def lock_and_unlock(self, match: Any) -> None:
        """Pin and unpin."""
        self.cache.dec_lock_ref(self.cache.inc_lock_ref(match.handle))

    def evict(self, num_tokens: int) -> None:
        """Free tokens."""
        self.cache.evict(num_tokens)

    def insert_chunks(self, tokens: Any, slots: Any, chunk: int) -> None:
        """Continue each chunk at the handle of the one before."""
        cache, handle = self.cache, None
        for end in range(chunk, len(tokens) + 1, chunk):
            grown = cache.inc_lock_ref(cache.insert(RadixKey(tokens[:end]), slots[:end], after=handle).handle)
            if handle is not None:
                cache.dec_lock_ref(handle)
            handle = grown

    def move_lock(self, previous: Any, tokens: Any) -> Any:
        """Not used: `insert_chunks` moves the lock itself."""


class _NoPool:
    """An allocator without a pool; a free is counted and forgotten."""

    device = "cpu"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def free(self, *_: Any, **__: Any) -> None:
        """Forget."""

    free_segment = free_segments = free_full = free_swa = free_group_begin = free_group_end = free

    def available_size(self) -> int:
        """Always enough."""
        return 1 << 40

    def get_kvcache(self) -> None:
        """Nothing."""


class SGLangTree(Tree):
    """One of SGLang's trees: `radix`, `unified-python` or `unified-rust`."""

    def __init__(self, page_size: int, kind: str) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache as FlatCache
        from sglang.srt.mem_cache.radix_cache import RadixKey as FlatKey

        self._torch, self._base, self._key = torch, base, FlatKey
        # Whole pages are a slice of the key, which copies; the Rust core copies into memory of its own.
        self._keeps_tokens = page_size == 1 and kind != "unified-rust"
        params: dict[str, Any] = {
            "disable": False,
            "req_to_token_pool": None,
            "token_to_kv_pool_allocator": _NoPool(page_size),
            "page_size": page_size,
        }
        if kind == "radix":
            self.cache: Any = FlatCache(CacheInitParams(**params))
            return
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        full, core = (ComponentType.FULL,), kind.removeprefix("unified-")
        self.cache = UnifiedRadixCache(CacheInitParams(**params, tree_components=full, tree_core_backend=core))

    def prepare(self, token_ids: np.ndarray, slots: np.ndarray | None = None) -> tuple[Any, Any]:
        """An array of 64-bit integers and a tensor."""
        tensor = None if slots is None else self._torch.from_numpy(np.ascontiguousarray(slots))
        return array("q", token_ids.tobytes()), tensor

    def _aligned(self, tokens: Any) -> Any:
        return self._key(tokens).page_aligned(self.cache.page_size)

    def insert(self, tokens: Any, slots: Any) -> Any:
        """Build the key and insert."""
        key = self._aligned(tokens)
        return self.cache.insert(self._base.InsertParams(key=key, value=slots[: len(key)]))

    def insert_copy(self, tokens: Any, slots: Any) -> Any:
        """As SGLang's engine does, which slices a request's tokens for each insert."""
        return self.insert(tokens[:] if self._keeps_tokens else tokens, slots)

    def match(self, tokens: Any) -> Any:
        """Build the key and match."""
        return self.cache.match_prefix(self._base.MatchPrefixParams(key=self._key(tokens)))

    def slots_of(self, match: Any) -> Any:
        """Join the slots."""
        return self.cache.path_device_indices(match.last_device_node)

    def length_of(self, match: Any) -> int:
        """Tokens matched."""
        return match.device_prefix_len

    def lock_and_unlock(self, match: Any) -> None:
        """Pin and unpin."""
        self.cache.unlock(self.cache.lock(match.last_device_node))

    def evict(self, num_tokens: int) -> None:
        """Free tokens."""
        self.cache.evict(self._base.EvictParams(num_tokens=num_tokens))

    def move_lock(self, previous: Any, tokens: Any) -> Any:
        """Match what was stored, pin it, unpin the chunk before, as `checkpoint` does."""
        lock = self.cache.lock(self.match(tokens).last_device_node)
        if previous is not None:
            self.cache.unlock(previous)
        return lock


def available_trees() -> dict[str, Callable[[int], Tree]]:
    """Trees that can be built here; SGLang's only where it is installed."""
    trees: dict[str, Callable[[int], Tree]] = {"kvgraft": KVGraftTree}
    try:
        import sglang_stand_ins

        sglang_stand_ins.install()
        import sglang  # noqa: F401
    except ImportError:
        return trees
    for kind in ("radix", "unified-python", "unified-rust"):

        def build(page_size: int, kind: str = kind) -> Tree:
            return SGLangTree(page_size, kind)

        trees[f"sglang {kind}"] = build
    return trees
