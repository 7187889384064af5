"""K/V of another text for a request that asked for it, named by a semantic provider and found in SGLang's tree.

They are copied into slots of the request like any other donor's K/V, at the same positions after the exact prefix.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.donors import Donor
from kvgraft.integrations.sglang.donors.texts import Origin, TreeKV, TreeText
from kvgraft.integrations.sglang.planning.spans import LoadSpan
from kvgraft.types import STAND_IN, Fidelity

if TYPE_CHECKING:
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.types import Namespace, Substitution


@dataclass(frozen=True, slots=True)
class TreeSubstitutes:
    """Lets texts of SGLang's tree stand in where a provider names them. Not thread-safe."""

    provider: Substitutes
    tree: DonorTree
    page_size: int

    def find(
        self,
        req: Any,  # noqa: ANN401 - SGLang's Req
        namespace: Namespace,
        tokens: array[int],
        *,
        prefix_len: int,
        reused_len: int,
    ) -> tuple[LoadSpan, Substitution] | None:
        """Ask for a text that stands in for positions from `prefix_len` on; None if that gains too little.

        The `extra_key` and `cache_salt` of `req` name the part of the tree that is looked into. `tokens` are the prompt up to
        the last position that may be loaded and one more, `reused_len` of which verified matches give.
        """
        numbers = np.frombuffer(tokens[:], np.int64)
        proposal = self.provider.propose(req.rid, numbers, prefix_len, reused_len)
        if proposal is None:
            return None
        other = array("q", proposal.token_ids.tobytes())
        text = TreeText(other, namespace, req.extra_key, req.cache_salt, 0, 0, Origin(proposal.source.source_id))
        length = self.tree.resident(text, len(other)).length // self.page_size * self.page_size
        if not self.provider.realised(proposal, length):
            return None
        donor = Donor(STAND_IN, namespace, proposal.token_ids.astype(np.int32), TreeKV(text, 0))
        span = LoadSpan(prefix_len, length - prefix_len, donor, prefix_len, fidelity=Fidelity.SUBSTITUTED)
        return span, proposal.source
