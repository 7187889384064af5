"""Attention of packed rows over K/V in slots: one interface, several backends."""

from kvgraft.engine.attention.base import AttentionBackend, BatchAttention, LayerQuery
from kvgraft.engine.attention.choose import ATTENTION_BACKENDS, AttentionChoice, AttentionHeads, choose_attention

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionHeads",
    "BatchAttention",
    "LayerQuery",
    "choose_attention",
]
