"""Donors: the catalogue of texts, the search for them in a prompt, and the plan of what to reuse. Numpy alone.

Public modules: `front` (digests of the text before a text).
"""

from __future__ import annotations

from kvgraft.donors.catalogue import BYTES_PER_TOKEN, AddResult, DonorCatalogue, DonorWatcher
from kvgraft.donors.donor import Donor, DonorText
from kvgraft.donors.fingerprint import GRAM_TOKENS, GUARANTEED_RUN
from kvgraft.donors.planner import CostModel, plan_graft
from kvgraft.donors.query import DonorQuery
from kvgraft.donors.secret import new_secret, set_process_secret

__all__ = [
    "BYTES_PER_TOKEN",
    "GRAM_TOKENS",
    "GUARANTEED_RUN",
    "AddResult",
    "CostModel",
    "Donor",
    "DonorCatalogue",
    "DonorQuery",
    "DonorText",
    "DonorWatcher",
    "new_secret",
    "plan_graft",
    "set_process_secret",
]
