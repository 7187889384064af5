"""How faithful reuse is: metrics against full prefill."""

from __future__ import annotations

from kvgraft.fidelity.metrics import Agreement, AgreementSummary, compare

__all__ = ["Agreement", "AgreementSummary", "compare"]
