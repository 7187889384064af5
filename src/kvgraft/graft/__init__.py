"""Carry a plan out: RoPE shift, copies, sparse prefill and selection policies.

Public modules: `executor`, `model`, `rope`, `rope_proof`, `sparse_prefill`.
"""
