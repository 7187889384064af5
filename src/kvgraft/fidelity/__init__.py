"""How faithful reuse is: metrics against full prefill, and the full prefill of the model itself."""

from __future__ import annotations

from kvgraft.fidelity.metrics import Agreement, AgreementSummary, compare
from kvgraft.fidelity.stock import StockAnswer, stock_answer

__all__ = ["Agreement", "AgreementSummary", "StockAnswer", "compare", "stock_answer"]
