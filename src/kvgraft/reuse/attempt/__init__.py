"""One attempt at a request, from its lookup to its end: a state machine without I/O.

It receives events and returns commands, which an engine's adapter carries out in order; what fails on the way is an event,
too. So what becomes of a graft that breaks off half-way is decided here, in `Attempt.receive`, and nowhere else.

    WAITING --Admitted--> COPYING --Copied--> UNREPAIRED --Ran--> REPAIRING --Repaired--> SETTLED --Finished--> OVER

Without a graft a request is `SETTLED` from its admission on; without a repair after its first token, once it is copied.
`Reset` makes `STALE` what waits. The form is that of protocol libraries without I/O (h11, hyper's h2).

Public modules: `commands`, `events`.
"""

from kvgraft.reuse.attempt.driver import drive
from kvgraft.reuse.attempt.machine import Attempt, AttemptPhase, Earlier
from kvgraft.reuse.attempt.prompt import AskedPrompt

__all__ = ["AskedPrompt", "Attempt", "AttemptPhase", "Earlier", "drive"]
