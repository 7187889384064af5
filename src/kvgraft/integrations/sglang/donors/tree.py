"""The part of SGLang's radix tree and allocator that is used; `GraftRadixCache` provides it, tests fake it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.integrations.sglang.donors.texts import TreeText


class Resident(NamedTuple):
    """The part of a path that is on the device.

    Attributes:
        length: Tokens from the root, whole pages.
        node: Handle of the last node, for `pin` and `slots`; it may reach further.
    """

    length: int
    node: object


class DonorTree(Protocol):
    """A radix tree with its allocator."""

    def resident(self, text: TreeText, end: int) -> Resident:
        """Return how many of the first `end` tokens are on the device. Changes nothing, recency included.

        So what one rank asks alone, as where another has failed, leaves trees of ranks alike.
        """

    def touch(self, text: TreeText, end: int) -> None:
        """Note a use of the first `end` tokens, as far as they are there."""

    def pin(self, node: object) -> object:
        """Keep the path to `node` from eviction; returns what `unpin` takes."""

    def unpin(self, pin: object) -> None:
        """Give a pin back."""

    def slots(self, node: object) -> Tensor:
        """Return the slots on the path to `node`, int64; good while it is pinned."""

    def allocate(self, num_tokens: int) -> Tensor | None:
        """Allocate whole pages, evicting what is not pinned; None if there is no room."""

    def free(self, slots: Tensor) -> None:
        """Give slots of `allocate` back."""

    def adopt(self, text: TreeText, slots: Tensor, known: int) -> None:
        """Insert a path of which the first `known` tokens are there; the tree owns the slots after these from now on.

        Where it fails, the tree owns those of the part that is `resident`.
        """

    def empty(self) -> None:
        """Evict everything that is not pinned or a request's."""
