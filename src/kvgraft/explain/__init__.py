"""Shows what was reused for a request, from its report alone: in a terminal, and as a page in one file.

Reports have the same form in all engines (`kvgraft.reuse.report`). Nothing here needs an engine or a model, and only `live`
the network.

Public modules: `requests` (reads reports), `live` (asks a server for them), `hints` (reasons in words), `terminal`, `page`,
`palette`, `text`.
"""

from __future__ import annotations

from kvgraft.explain.requests import ExplainedRequest, ReportedAttempt, ReportedRun, RunKind, read_requests

__all__ = ["ExplainedRequest", "ReportedAttempt", "ReportedRun", "RunKind", "read_requests"]
