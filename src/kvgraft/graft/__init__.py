"""Carry a plan out: RoPE shift, copies, sparse prefill and selection policies."""
