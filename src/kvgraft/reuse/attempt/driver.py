"""Carries out what attempts command, and reports what failed to them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvgraft.reuse.attempt.events import Failed
from kvgraft.reuse.failures import miss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.reuse.attempt.commands import Command
    from kvgraft.reuse.attempt.events import Event
    from kvgraft.reuse.attempt.machine import Attempt


def drive(
    attempt: Attempt, event: Event, do: Callable[[Command], None], failed: Callable[[Event | Command, Exception], None]
) -> None:
    """Have an attempt take an event, and carry out what follows, in order; what it says of a failure comes next.

    Args:
        attempt: Of one request.
        event: What the engine did.
        do: Carries out a command, or raises.
        failed: Hears what failed, for a log and for books that may be half changed; does not raise.
    """
    due: deque[Command] = deque()
    try:
        due.extend(attempt.receive(event))
    except Exception as error:  # noqa: BLE001 - heard there
        failed(event, error)
        due.extend(attempt.receive(Failed(event, miss_of(error).detail)))
    while due:
        command = due.popleft()
        try:
            do(command)
        except Exception as error:  # noqa: BLE001 - heard there
            failed(command, error)
            due.extendleft(reversed(attempt.receive(Failed(command, miss_of(error).detail))))
