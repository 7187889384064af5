"""The core of reuse, the same for all engines: look a request up, follow its lineage, register its text, report it.

Nothing here touches K/V or knows an engine; all of it runs on numpy alone. An engine adapter says what its engine did
(admitted, copied, computed again, started the request anew) and asks what follows from it.

Public modules: `asked`, `classes`, `continuation`, `decision`, `donor_events`, `families`, `metrics` for its names,
`reads`, `repair_time`, `sent_fronts`, `stored`.
"""

from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.reuse.donor_rules import DonorRules
from kvgraft.reuse.failures import Soundness, miss_of
from kvgraft.reuse.lineage import ComputedRun, Lineage, computed_runs, copied_generation, reused_span
from kvgraft.reuse.lookup import DonorFinder, Found, Lookup, ProposalCounters, Proposer, ResidentDonors
from kvgraft.reuse.metrics import Metric, Sample, samples, token_kinds, token_outcome
from kvgraft.reuse.policy import available_policies, configured_policy, selection_names
from kvgraft.reuse.report import (
    REPORT_VERSION,
    report_as_dict,
    request_report,
    risk_as_dict,
    verified_report,
    worst_report,
)
from kvgraft.reuse.substitute import Substitute, Substitutes

__all__ = [
    "REPORT_VERSION",
    "ComputedRun",
    "DonorAnnouncer",
    "DonorFinder",
    "DonorRules",
    "Found",
    "Lineage",
    "Lookup",
    "Metric",
    "ProposalCounters",
    "Proposer",
    "ResidentDonors",
    "Sample",
    "Soundness",
    "Substitute",
    "Substitutes",
    "available_policies",
    "computed_runs",
    "configured_policy",
    "copied_generation",
    "miss_of",
    "report_as_dict",
    "request_report",
    "reused_span",
    "risk_as_dict",
    "samples",
    "selection_names",
    "token_kinds",
    "token_outcome",
    "verified_report",
    "worst_report",
]
