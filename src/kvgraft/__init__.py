"""kvgraft: reuse the KV cache of text a model has already read, wherever it appears in a prompt."""

from __future__ import annotations

__version__ = "0.1.0"
