"""What became of a request up to its end or to a retraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.reuse.report import report_as_dict

if TYPE_CHECKING:
    from kvgraft.types import GraftReport


@dataclass(frozen=True, slots=True)
class Attempt:
    """One computation of a request.

    Attributes:
        report: What was reused for it.
        sources: By span of the report, who computed it and from which tier it was copied.
        prefill_steps: Scheduler steps that its prefill took.
    """

    report: GraftReport
    sources: tuple[dict[str, object], ...]
    prefill_steps: int

    def as_dict(self) -> dict[str, object]:
        """Return it in types that JSON has."""
        return {**report_as_dict(self.report), "sources": list(self.sources), "prefill_steps": self.prefill_steps}
