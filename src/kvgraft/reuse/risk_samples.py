"""What is held of risks, as metrics take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.reuse.metrics import RISK_AUDITS, RISK_CERTIFIED, Sample
from kvgraft.types import RiskStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvgraft.types import RiskStatement


def risk_samples(statements: Mapping[str, Mapping[str, RiskStatement]]) -> Iterator[Sample]:
    """Yield the gauges of what may be said of each reuse class and part of its answers; others are to be removed."""
    for name, parts in statements.items():
        for part, risk in parts.items():
            yield Sample(RISK_AUDITS, (name, part, risk.notch, risk.status.value), risk.audits)
            certified = risk.epsilon if risk.status is RiskStatus.CERTIFIED and risk.epsilon is not None else 1.0
            yield Sample(RISK_CERTIFIED, (name, part), certified)
