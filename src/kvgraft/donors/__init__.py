"""Which text do we have: donors, the index that finds them in a prompt, and the plan of what to reuse. Numpy alone.

Public modules: `front` (digests of what stood in front), `record`.
"""

from __future__ import annotations

from kvgraft.donors.catalogue import BYTES_PER_TOKEN, AddResult, DonorCatalogue, DonorWatcher, new_secret
from kvgraft.donors.donor import Donor
from kvgraft.donors.fingerprint import GRAM_TOKENS, GUARANTEED_RUN
from kvgraft.donors.planner import CostModel, ends_lineage, plan_graft

__all__ = [
    "BYTES_PER_TOKEN",
    "GRAM_TOKENS",
    "GUARANTEED_RUN",
    "AddResult",
    "CostModel",
    "Donor",
    "DonorCatalogue",
    "DonorWatcher",
    "ends_lineage",
    "new_secret",
    "plan_graft",
]
