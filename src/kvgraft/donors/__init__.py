"""Which text do we have: donors, the index that finds them in a prompt, and the plan of what to reuse. Numpy alone."""

from __future__ import annotations

from kvgraft.donors.catalogue import AddResult, DonorCatalogue, new_secret
from kvgraft.donors.donor import Donor
from kvgraft.donors.fingerprint import GRAM_TOKENS, GUARANTEED_RUN
from kvgraft.donors.planner import CostModel, plan_graft

__all__ = [
    "GRAM_TOKENS",
    "GUARANTEED_RUN",
    "AddResult",
    "CostModel",
    "Donor",
    "DonorCatalogue",
    "new_secret",
    "plan_graft",
]
