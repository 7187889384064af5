"""When the choice of a request's policy is computed: what every engine says of it alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.types import RepairReport, RepairTime

if TYPE_CHECKING:
    from collections.abc import Callable

ONE_TOKEN = "one token was asked for"
"""Reason to wait of an answer that is its first token alone."""
CONSTRAINED = "the first token decides a constrained answer"
"""Reason to wait of a choice, an expression or a grammar; JSON begins with a brace in any case. A third of answers that name
a function began otherwise over plain copies, none after the repair (`benchmarks/results/first-tokens-smollm2.json`).
"""
REPEATS = "the prompt says much of what is copied twice"
"""Reason to wait of a prompt that `graft.select.says_much_twice`: its first token would be the one that is off."""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """When the choice is to be computed. What became of that is a `RepairReport`.

    Attributes:
        time: Before the first token, or after it.
        reason: Why it is not the time that was asked for; empty if it is.
    """

    time: RepairTime
    reason: str = ""

    def report(self, from_token: int | None = None) -> RepairReport:
        """Return the report of it, before anything else is known; `from_token` is drawn from what is repaired."""
        return RepairReport(self.time, self.reason, from_token)


def planned_repair(asked: RepairTime, reason_to_wait: Callable[[], str]) -> RepairPlan:
    """Return when the choice is computed of a request that `asked` for a time.

    Args:
        asked: By the request or the settings.
        reason_to_wait: Called where the first token was asked for before the choice: why it waits nevertheless, or an empty
            text.
    """
    reason = reason_to_wait() if asked is RepairTime.AFTER else ""
    return RepairPlan(RepairTime.BEFORE if reason else asked, reason)
