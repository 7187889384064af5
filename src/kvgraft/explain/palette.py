"""Colours of what was reused, as a style sheet's variables; the page of a request and the inspector have the same."""

from __future__ import annotations

PALETTE = """\
:root { color-scheme: light dark; --exact: #2e7d32; --continued: #00838f; --shifted: #1565c0;
  --substituted: #8e24aa; --computed: #e08a00; --recomputed: #c62828; --line: #8886; --pale: #8882; }
@media (prefers-color-scheme: dark) { :root { --exact: #66bb6a; --continued: #4dd0e1; --shifted: #64b5f6;
  --substituted: #ce93d8; --computed: #ffb74d; --recomputed: #ef5350; } }
"""
