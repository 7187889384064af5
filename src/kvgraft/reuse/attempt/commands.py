"""What an engine's adapter does for an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.reuse.claim import Claim


@dataclass(frozen=True, slots=True)
class Open:
    """Make room for the text that the request computes beside its graft; without it nothing of that is kept."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Copy:
    """Have the graft made. Its outcome comes as `Copied`."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Credit:
    """Note the use of the graft's donors."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Void:
    """Have the copy fail that the engine counts on: its outcome comes as `Copied`. No error where its donors are gone."""

    claim: Claim
    reason: str
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class RepairNow:
    """Have the policy's choice computed before the next token is drawn. Its outcome comes as `Repaired`."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up what is under way or kept for the request; no outcome is awaited."""


@dataclass(frozen=True, slots=True)
class Hide:
    """Let no request go on from its blocks; from those of a settled one, others may still."""

    is_settled: bool = False


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let the donors of the graft be evicted: they are copied, or will not be."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Make donors of the text that the graft computed; give it up where none was made."""

    is_made: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Keep the answer, which is complete."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Give up all text of the request; what is a donor already stays one."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give everything back that the request holds."""


@dataclass(frozen=True, slots=True)
class Recount:
    """Count some of the promised tokens as computed: the engine counted all of them as cached."""

    num_promised: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class Count:
    """Count a failure of reuse."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Write the report, and count it unless an outcome may change it."""

    is_final: bool


Command = (
    Open
    | Copy
    | Credit
    | Void
    | RepairNow
    | Cancel
    | Hide
    | Unpin
    | Keep
    | Close
    | Discard
    | Release
    | Recount
    | Count
    | Tell
)
