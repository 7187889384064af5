"""What tests of kvgraft and of its plug-ins share: suites, oracles, tiny models of many architectures.

Public modules: `memory_store`, `prefix_suite`, `radix_walk`, `registries`, `schemas`, `slots`, `store_suite`,
`stored_objects`, `swa_model`, `swa_walk`, `tiny_models`.
"""
