"""The wishes of a request, from the one field that an engine lets it have for us."""

from __future__ import annotations

from kvgraft.types import RepairTime, ReuseMode

PARAMETER = "kvgraft"
"""Key of our part of a request's parameters, and of the report in its response."""
REPAIR_PARAMETER = f"{PARAMETER}_repair"
"""Key of the time at which a request wants the policy's choice computed."""


def asked_mode(given: object, where: str) -> tuple[ReuseMode, str]:
    """Return the mode that a request asks for, and what is wrong with that; a wrong value reuses nothing.

    `verified` is `exact` in an engine of others, which has no place for drafts: the answer is the same, a full prefill's.

    Args:
        given: What stands under `PARAMETER`, or the server's default.
        where: The field, for the message.
    """
    try:
        mode = ReuseMode(str(given))
    except ValueError:
        return ReuseMode.OFF, f"{where}[{PARAMETER!r}] must be {', '.join(ReuseMode)}, not {given!r}"
    return (ReuseMode.EXACT if mode is ReuseMode.VERIFIED else mode), ""


def asked_repair(given: object, where: str) -> tuple[RepairTime, str]:
    """Return the time of the repair that a request asks for, and what is wrong with that.

    Args:
        given: What stands under `REPAIR_PARAMETER`, or the server's default.
        where: The field, for the message.
    """
    try:
        return RepairTime(str(given)), ""
    except ValueError:
        wrong = f"{where}[{REPAIR_PARAMETER!r}] must be {' or '.join(RepairTime)}, not {given!r}"
        return RepairTime.BEFORE, wrong
