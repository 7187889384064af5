"""Decisions for a prompt: spans that SGLang can load, agreed by all ranks, chunk by chunk. Copies nothing."""
