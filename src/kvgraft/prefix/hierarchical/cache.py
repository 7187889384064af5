"""Prefix cache over two tiers: device slots, and copies in host memory that outlive them.

    device, no copy  --backup-->  device + host  --evict-->  host only  --load back-->  device + host
                     --evict (no room on the host)-->  gone              --evict host-->  gone

A matched prefix is a device part followed by a host part. The cache moves nothing itself: the owner of the pools does,
through `TierTransfer`, and a transfer that fails leaves the tree as it was.
"""

from __future__ import annotations

from kvgraft.prefix.hierarchical.load_back import BaseLoadBackCache
from kvgraft.prefix.hierarchical.node import HierNode
from kvgraft.prefix.radix.cache import SemanticRadixCache


class HierarchicalRadixCache(BaseLoadBackCache[HierNode], SemanticRadixCache[HierNode]):
    """A radix cache with evicted prefixes that live on in host memory and can be brought back. Not thread-safe."""

    _node_class = HierNode
