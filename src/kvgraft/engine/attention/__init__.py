"""Attention of packed rows over K/V in slots: one interface, several backends."""

from kvgraft.engine.attention.base import AttentionBackend, BatchAttention, LayerQuery
from kvgraft.engine.attention.choose import ATTENTION_BACKENDS, AttentionChoice, AttentionHeads, choose_attention
from kvgraft.engine.attention.hybrid import HybridBatch

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionHeads",
    "BatchAttention",
    "HybridBatch",
    "LayerQuery",
    "choose_attention",
]
