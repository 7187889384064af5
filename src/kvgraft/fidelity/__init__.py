"""How faithful reuse is: metrics against full prefill, and the full prefill of the model itself."""

from __future__ import annotations

from kvgraft.fidelity.metrics import AgreementSummary, Divergence, answer_nll, divergence
from kvgraft.fidelity.stock import StockAnswer, StockReference, stock_answer, stock_logits, stock_reference
from kvgraft.model_cache import cache_argument, cache_of

__all__ = [
    "AgreementSummary",
    "Divergence",
    "StockAnswer",
    "StockReference",
    "answer_nll",
    "cache_argument",
    "cache_of",
    "divergence",
    "stock_answer",
    "stock_logits",
    "stock_reference",
]
