"""Tests of the halves of the connector that need no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # stand_ins.py
