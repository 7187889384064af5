"""What every engine does alike with a request: look it up, follow its lineage, register its text, report it.

Nothing here touches K/V or knows an engine; all of it runs on numpy alone. An engine adapter says what its engine did
(admitted, copied, computed again, started the request anew) and asks what follows from it.

Public modules: `metrics`, for its names.
"""

from kvgraft.reuse.lineage import ComputedRun, Lineage, computed_runs, reused_span
from kvgraft.reuse.lookup import DonorFinder, Found, Lookup
from kvgraft.reuse.metrics import Metric, Sample, samples, token_kinds, token_outcome
from kvgraft.reuse.policy import available_policies, configured_policy
from kvgraft.reuse.registration import Registration
from kvgraft.reuse.report import REPORT_VERSION, report_as_dict, request_report, worst_report

__all__ = [
    "REPORT_VERSION",
    "ComputedRun",
    "DonorFinder",
    "Found",
    "Lineage",
    "Lookup",
    "Metric",
    "Registration",
    "Sample",
    "available_policies",
    "computed_runs",
    "configured_policy",
    "report_as_dict",
    "request_report",
    "reused_span",
    "samples",
    "token_kinds",
    "token_outcome",
    "worst_report",
]
