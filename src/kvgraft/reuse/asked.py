"""What a request asks for in the one field that an engine lets it have for us."""

from __future__ import annotations

from kvgraft.types import ReuseMode

PARAMETER = "kvgraft"
"""Key of our part of a request's parameters, and of the report in its response."""


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
