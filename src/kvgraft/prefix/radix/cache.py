"""The exact prefix cache of one pool, with a semantic provider for what is not stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from kvgraft.prefix.request import RequestRow
    from kvgraft.prefix.results import EvictResult, MatchPrefixParams, MatchResult
    from kvgraft.prefix.semantic_fallback import SemanticFallback, SlotCopier
    from kvgraft.substitution import SemanticPrefixProvider

Node = TypeVar("Node", bound=RadixNode)


class SemanticRadixCache(BaseRadixCache[Node]):
    """A radix cache that takes a semantic provider."""

    _semantic: SemanticFallback | None = None

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Match as `BaseRadixCache`; on behalf of a request the provider, if one is set, is asked about what is left."""
        if isinstance(params, RadixKey):
            return self._match_prefix_exact(params)
        result = self._match_prefix_exact(params.key)
        if self._semantic is None or params.req is None:
            return result
        return self._semantic.on_miss(self, params.key, params.req.rid, result)

    def cache_finished_req(self, req: RequestRow, *, is_insert: bool = True) -> EvictResult:
        """Store and release as any cache; the provider hears of it unless nothing was inserted."""
        announce = self._semantic is not None and is_insert and not req.skip_insert and not self._disabled
        token_ids = req.token_ids[: req.committed_len]
        result = super().cache_finished_req(req, is_insert=is_insert)
        if announce and self._semantic is not None:
            self._semantic.guard.cached(req.rid, token_ids)
        return result

    @property
    def semantic(self) -> SemanticFallback | None:
        """The active semantic fallback with its counters, or None."""
        return self._semantic

    def set_semantic_provider(
        self,
        provider: SemanticPrefixProvider | None,
        *,
        copy_slots: SlotCopier | None = None,
        deadline_s: float | None = None,
        min_semantic_gain: int = 1,
    ) -> None:
        """Ask `provider` where an exact lookup on behalf of a request leaves much to compute; None asks none any more.

        Args:
            provider: Its `on_init` is called once, here; its `on_shutdown` is its owner's to call.
            copy_slots: Copies the KV of given slots into new ones and returns those, or None if there is no room. A
                hit then hands out slots that the caller owns. Without it a hit refers to the donor's slots, read-only
                and under the donor's lock.
            deadline_s: Seconds that a call may take; a call that raises or takes longer is a counted miss. None calls
                directly and lets exceptions through.
            min_semantic_gain: Least tokens that a proposal must give after the exact prefix. None is asked where fewer are
                left to compute: a first token or a system prompt that is stored does not silence the provider.
        """
        if self._semantic is not None:
            self._semantic.guard.close()
        self._semantic = None
        if provider is not None:
            from kvgraft.prefix.semantic_fallback import SemanticFallback  # loaded where a provider is set
            from kvgraft.substitution import GuardedProvider

            guard = GuardedProvider(provider, deadline_s)
            self._semantic = SemanticFallback(guard, copy_slots=copy_slots, min_semantic_gain=min_semantic_gain)
            provider.on_init()


class RadixCache(SemanticRadixCache[RadixNode]):
    """A radix tree on one pool of slots; namespaces part at the root's children. Not thread-safe."""

    _node_class = RadixNode

    def evict(self, num_tokens: int, *, trim: bool = False) -> EvictResult:
        """Drop unlocked leaves in the order of the policy until `num_tokens` are freed or nothing unlocked is left.

        Args:
            num_tokens: Tokens to free.
            trim: Cut the last leaf, so that no page is dropped beyond what is asked for; otherwise nodes go whole,
                which is cheaper and leaves fewer fragments.

        Complexity: O(log n) per dropped node plus O(tokens freed), with `trim` O(tokens of the last leaf) more.
        """
        return self._evict_leaves(num_tokens, trim=trim)
