"""Suites, fakes and tiny models for tests of stores, prefix caches, policies and other plug-ins.

Public modules: `memory_store`, `prefix_suite`, `registries`, `slots`, `store_suite`, `stored_objects`, `tiny_models`.
"""
