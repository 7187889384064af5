"""What tests of kvgraft and of its plug-ins share: suites, oracles, tiny models of many architectures.

Public modules: `prefix_suite`, `radix_walk`, `slots`, `store_suite`, `swa_model`, `swa_walk`, `tiny_models`.
"""
