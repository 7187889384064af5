"""Prompts that are computed in full although text of them could be reused approximately once more.

What is grafted stays approximate for all prompts that begin alike: the next turn of the conversation, the next question
about the document. Each of them looks at it again, computes a share of it again and corrects the rest, where an exact prefix
would cost nothing. Healing ends that on idle time; a server without any would pay for ever, in the end more than one that
reuses exact prefixes alone.

This is the problem of renting or buying: renting until the rent has cost as much as buying, and buying then, never costs more
than twice what hindsight would (Karlin et al., Competitive snoopy caching, 1988). The shares that a policy computes again,
with its look at the prompt and the correction, are about a fifth of a prefill, so a few prompts rent and the next one buys.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvgraft.donors.front import Fronts
from kvgraft.types import GraftPlan, Miss, MissReason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.types import KeyedNamespace, Namespace

_REMEMBERED = 4096
"""Prompts, and places in them, that are remembered: the last ones, about 200 bytes each."""


class Refresh:
    """Remembers which beginnings were reused approximately, and how often. Not thread-safe.

    Prompts are distinguished by their tokens: a lookup that is repeated while a request waits counts once, and has the
    same answer. A beginning ends where a reused span does, so that turns of a conversation are recognised, and other
    questions about one text.
    """

    def __init__(self, after: int) -> None:
        """Remember nothing; `after` can be read.

        Args:
            after: Prompts that may reuse one beginning approximately before the next one is computed in full; 0 for any
                number.
        """
        self.after = after
        self._paid: OrderedDict[bytes, int] = OrderedDict()
        self._answers: OrderedDict[bytes, int] = OrderedDict()

    def clear(self) -> None:
        """Remember nothing: what was reused is gone."""
        self._paid.clear()
        self._answers.clear()

    def revised(
        self, namespace: Namespace | KeyedNamespace, token_ids: NDArray[np.integer[Any]], plan: GraftPlan
    ) -> GraftPlan | Miss:
        """Return the plan, or what is left of it where it is the prompt's turn to be exact as far as others begin alike.

        Where more is reused after that than before, it stays; where it is less, it is computed, too.

        Complexity: O(num_tokens) of hashing where the plan has approximate spans.
        """
        if not self.after or not plan.is_approximate:
            return plan
        stop = self._due(namespace.key, token_ids, plan)
        kept = [span for span in plan.spans if span.is_exact or span.target_start >= stop]
        if len(kept) == len(plan.spans):
            return plan
        if kept:
            return GraftPlan.over(plan.num_tokens, plan.prefix_len, kept)
        return Miss(
            MissReason.REFRESHED,
            f"{self.after} prompts with the same beginning reused {plan.reused_len} tokens of it approximately",
        )

    def _due(self, key: bytes, token_ids: NDArray[np.integer[Any]], plan: GraftPlan) -> int:
        """Return the position before which nothing is to be reused approximately; 0 if everything may be."""
        spans = [span for span in plan.spans if not span.is_exact]
        fronts = Fronts(key, token_ids)
        *places, prompt = [fronts.up_to(stop) for stop in [*(span.target_end for span in spans), len(token_ids)]]
        known = self._answers.get(prompt)
        if known is not None:
            return known
        num_due = max((i + 1 for i, place in enumerate(places) if self._paid.get(place, 0) >= self.after), default=0)
        rest = sum(span.length for span in spans[num_due:])
        if rest < sum(span.length for span in spans[:num_due]):
            num_due = len(spans)  # a little that stays approximate keeps everything after it from being exact
        # Others that begin alike may be looked up before this one is computed: one of them is enough.
        for place in places[:num_due]:
            self._paid.pop(place, None)
        for place in places[num_due:]:
            _remember(self._paid, place, self._paid.get(place, 0) + 1)
        stop = spans[num_due - 1].target_end if num_due else 0
        _remember(self._answers, prompt, stop)
        return stop


def _remember(entries: OrderedDict[bytes, int], key: bytes, value: int) -> None:
    """Set an entry and forget the one that was set longest ago, if there are too many."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > _REMEMBERED:
        entries.popitem(last=False)
