"""A selection policy that fails at the step of one's choice: a plug-in of other people."""

from __future__ import annotations

from kvgraft.graft.select import Observable, Recompute, SelectionPolicy

CHOSEN = 8
"""Tokens of each of its steps."""


class Failing(SelectionPolicy):
    """Looks at the query, as the pass that answers does, and fails when it has chosen so many times.

    Attributes:
        num_failures: So often it has failed.
    """

    name = "broken"
    observes = frozenset({Observable.QUERY_ATTENTION})
    recompute_ratio = 0.1

    def __init__(self, num_choices: int) -> None:
        self.num_choices = num_choices
        self.num_failures = 0

    def steps(self, context):
        yield Recompute(context.reused[:0], observe_query=True)
        for start in range(0, self.num_choices * CHOSEN, CHOSEN):
            yield Recompute(context.reused[start : start + CHOSEN])
        self.num_failures += 1
        raise ValueError("no choice")
