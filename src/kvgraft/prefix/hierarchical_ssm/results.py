"""Result of a lookup in two tiers with states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.ssm.results import StateMatchResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.hierarchical_ssm.node import TieredStateNode
    from kvgraft.prefix.results import PrefixHandle


class TieredStateMatchResult(StateMatchResult):
    """A match that ends at the deepest state on the device, and goes on to the deepest one of either tier after a load-back.

    Attributes:
        host_hit_len: Tokens from the one to the other. Some or all of them may lie on the device: what is missing there is
            on the host, and so is the state.
    """

    __slots__ = ("_host_handle", "host_hit_len")

    def __init__(
        self, path: Sequence[TieredStateNode], device: TieredStateNode, host: TieredStateNode, branching_len: int
    ) -> None:
        super().__init__(list(path), device, branching_len)
        self._host_handle = host
        self.host_hit_len = host.end - device.end

    @property
    def host_handle(self) -> PrefixHandle:
        """The prefix with the deepest state of either tier."""
        return self._host_handle
