"""When the choice of a request's policy is computed: what every engine says of it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.types import RepairReport, RepairTime

if TYPE_CHECKING:
    from collections.abc import Callable

ONE_TOKEN = "one token was asked for"
"""Reason to wait of an answer that is its first token alone."""
REPEATS = "the prompt says much of what is copied twice"
"""Reason to wait of a prompt that `graft.select.says_much_twice`: its first token would be the one that is off."""


def planned_repair(asked: RepairTime, reason_to_wait: Callable[[], str]) -> RepairReport:
    """Return when the choice is computed of a request that `asked` for a time.

    Args:
        asked: By the request or the settings.
        reason_to_wait: Called where the first token was asked for before the choice: why it waits nevertheless, or an empty
            text.
    """
    reason = reason_to_wait() if asked is RepairTime.AFTER else ""
    return RepairReport(RepairTime.BEFORE if reason else asked, reason)
