"""Policies that fail, for tests of more than one file."""

from __future__ import annotations

from kvgraft.graft.select import Recompute, SelectionPolicy


class FailsLater(SelectionPolicy):
    """Has tokens computed first, and fails when it is asked for more."""

    name = "fails_later"

    @property
    def recompute_ratio(self):
        return 0.05

    def steps(self, context):
        yield Recompute(context.reused[:20])
        raise ValueError("no second step")
