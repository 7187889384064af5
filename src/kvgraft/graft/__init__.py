"""Carry a plan out: RoPE shift, copies, sparse prefill, selection policies and drift correction.

Public modules: `drift`, `drift_estimate`, `drift_layout`, `drift_plan`, `executor`, `first_token`, `model`, `rope`,
`rope_proof`, `repair`, `row_attention`, `sinks`, `sparse_prefill`, `steps`, `weights`, `words`.
"""
