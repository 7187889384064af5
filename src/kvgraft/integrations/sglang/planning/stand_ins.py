"""K/V of another text for a request that asked for it, named by a semantic provider and found in SGLang's tree.

They are copied into slots of the request like any other donor's K/V, at the same positions behind the exact prefix.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.donors import Donor
from kvgraft.integrations.sglang.donors.texts import Origin, TreeKV, TreeText
from kvgraft.integrations.sglang.planning.spans import Span
from kvgraft.types import STAND_IN, Fidelity

if TYPE_CHECKING:
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.reuse.lineage import Lineage
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.types import Namespace, Substitution


@dataclass(frozen=True, slots=True)
class StandIn:
    """What stands in for a prompt.

    Attributes:
        span: Behind the exact prefix, whole pages.
        source: What is told about it.
    """

    span: Span
    source: Substitution


@dataclass(frozen=True, slots=True)
class StandIns:
    """Lets texts of SGLang's tree stand in where a provider names them. Not thread-safe."""

    substitutes: Substitutes
    tree: DonorTree
    page_size: int

    def find(
        self,
        req: Any,  # noqa: ANN401 - SGLang's Req
        namespace: Namespace,
        tokens: array[int],
        *,
        exact_len: int,
        reused_len: int,
    ) -> StandIn | None:
        """Ask for a text that stands in for positions from `exact_len` on; None if that gains too little.

        Args:
            req: Whose prompt; its `extra_key` and `cache_salt` name the part of the tree that is looked into.
            namespace: Of the request.
            tokens: The prompt, up to the last position that may be loaded and one more.
            exact_len: Tokens that SGLang has.
            reused_len: Tokens that verified matches give.
        """
        numbers = np.frombuffer(tokens[:], np.int64)
        proposal = self.substitutes.propose(req.rid, numbers, exact_len, reused_len)
        if proposal is None:
            return None
        other = array("q", proposal.token_ids.tobytes())
        text = TreeText(other, namespace, req.extra_key, req.cache_salt, 0, 0, Origin(proposal.source.source_id))
        length = self.tree.resident(text, len(other)).length // self.page_size * self.page_size
        if not self.substitutes.realised(proposal, length):
            return None
        donor = Donor(STAND_IN, namespace, proposal.token_ids.astype(np.int32), TreeKV(text, 0))
        span = Span(exact_len, length - exact_len, donor, exact_len, fidelity=Fidelity.SUBSTITUTED)
        return StandIn(span, proposal.source)

    def heard(self, req: Any, tokens: array[int], lineage: Lineage) -> None:  # noqa: ANN401 - SGLang's Req
        """Tell the provider what a finished request has stored."""
        self.substitutes.heard(req.rid, np.frombuffer(tokens[:], np.int64), lineage)
