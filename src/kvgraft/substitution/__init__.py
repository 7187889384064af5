"""The semantic hook: a provider may name other tokens with K/V that could stand in. Approximate by nature, off unless set.

Source: the contract of `SemanticPrefixProvider` follows SGLang pull request #20806 at the interface. What a hit does is
different, because there a hit lets two owners hold one slot and publishes the donor's K/V under the query's tokens: here
a hit is a copy or a locked read-only reference, is marked as substituted and is never stored (docs/design/prefix-cache.md).
"""

from __future__ import annotations

from kvgraft.substitution.guard import GuardedProvider, SemanticCounters
from kvgraft.substitution.loading import load_provider, provider_class
from kvgraft.substitution.provider import SemanticPrefixProvider, SemanticPrefixResult

__all__ = [
    "GuardedProvider",
    "SemanticCounters",
    "SemanticPrefixProvider",
    "SemanticPrefixResult",
    "load_provider",
    "provider_class",
]
