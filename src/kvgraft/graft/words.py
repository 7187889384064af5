"""Elements of tensors as the integers that they are in memory."""

from __future__ import annotations

import torch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element of so many bytes."""
