"""What requests go on from in vLLM's own prefix cache: approximate blocks under names that follow from their text.

vLLM finds them by the hashes of a request, before it asks the connector. So a request that may go on is given such names, and
asked to wait for vLLM's next look; nothing is copied, and vLLM's books, eviction and metrics of its cache stay its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.scheduler.private_hashes import (
    BlockFronts,
    ContinuationNames,
    PrivateBlockHashes,
    SharedNames,
    continued_hashes,
    make_private,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.types import Namespace


class Continuing:
    """Gives requests names for their approximate blocks, and finds those that others have left. Not thread-safe."""

    def __init__(self, facts: EngineFacts) -> None:
        """Begin with nothing that can be found."""
        self._block_size = facts.hash_block_size
        self._names = ContinuationNames()

    def forget(self) -> None:
        """Make what was named so far unknown to all: its K/V may be of another model."""
        self._names.renew()

    def extend(
        self, request: Request, namespace: Namespace, found_len: int, hit_len: Callable[[], int], *, stored_len: int = 0
    ) -> bool:
        """Give a request the names of the text that it can go on from, beyond what vLLM has found.

        Blocks of a text are of rising generations, where turns copied more: of each generation as many are taken as there
        are, the least often copied first.

        Args:
            request: With hashes as vLLM made them.
            namespace: Its own.
            found_len: Tokens that vLLM has found by these.
            hit_len: Looks once more, by the hashes that the request has then.
            stored_len: Exact tokens after these that a store beside us has, and that it keeps from a request with names.

        Returns:
            Whether there is such a text, longer than that, so that vLLM is to look again.

        Complexity: O(blocks) of hashing per generation, once anything was named.
        """
        if not self._names.top:
            return False
        plain, best, steps = request.block_hashes, None, list[tuple[int, int]]()
        least = found_len + stored_len
        first, fronts = found_len // self._block_size, BlockFronts(namespace.key, request, self._block_size)
        try:
            for generation in range(1, self._names.top + 1):
                tried = [*steps, (found_len // self._block_size, generation)]
                shared = SharedNames(self._names, fronts, self._names.epoch, tried)
                request.block_hashes = continued_hashes(plain, shared, first)
                if (length := hit_len()) > found_len:
                    found_len, steps, best = length, tried, request.block_hashes
            best = best if found_len > least else None
        finally:
            request.block_hashes = plain if best is None else best
        return best is not None

    def is_found_rightly(self, request: Request, found_len: int) -> bool:
        """Return whether what vLLM has found of a request may be there for it; if not, it is not found again.

        A request that was preempted may find its own secret blocks, or named ones of before a reset that failed.
        """
        hashes = request.block_hashes
        if found_len <= self.exact_len(request, found_len) or not isinstance(hashes, PrivateBlockHashes):
            return True
        if hashes.is_shared and self.generation(request, found_len):
            return True
        hashes.hide_from(found_len // self._block_size)
        return False

    def hide(self, request: Request) -> None:
        """Have no request find the blocks of one that are not exact any more, itself included."""
        if isinstance(request.block_hashes, PrivateBlockHashes):
            request.block_hashes.renew()

    def exact_len(self, request: Request, found_len: int) -> int:
        """Return how much of what vLLM has found of a request is exact."""
        hashes = request.block_hashes
        if not isinstance(hashes, PrivateBlockHashes):
            return found_len
        return min(found_len, hashes.first_private * self._block_size)

    def generation(self, request: Request, found_len: int) -> int:
        """Return the generation of what vLLM has found of a request beyond what is exact; 0 for nothing."""
        hashes = request.block_hashes
        is_plain = not isinstance(hashes, PrivateBlockHashes)
        return 0 if is_plain else hashes.generation_before(found_len // self._block_size)

    def keep_private(self, request: Request, first_block: int) -> PrivateBlockHashes:
        """Keep the blocks of a request from `first_block` on from all others."""
        hashes = make_private(request, first_block)
        hashes.hide_from(first_block)
        return hashes

    def share(self, request: Request, namespace: Namespace, first_block: int, generation: int) -> PrivateBlockHashes:
        """Keep the blocks of a request from `first_block` on from exact requests, and let others go on from them."""
        hashes = make_private(request, first_block)
        if not hashes.is_shared:
            fronts = BlockFronts(namespace.key, request, self._block_size)
            hashes.name_by(SharedNames(self._names, fronts, self._names.epoch, []))
        hashes.share_from(first_block, generation)
        self._names.top = max(self._names.top, generation)
        return hashes
