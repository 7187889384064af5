"""The main job as a demonstration: a RAG session over real documents, with and without reuse.

Public modules: `documents`, `handbook`, `runner`, `session`.
"""
