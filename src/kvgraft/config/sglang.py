"""Settings of `--radix-cache-backend kvgraft` in an SGLang server: from a file and the environment, no SGLang flags."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.config.reuse import REUSE, AdapterSettings
from kvgraft.config.setting import setting

_REPORTS = "reports"

BACKEND = "kvgraft"
"""Value for `--radix-cache-backend`."""


@dataclass(frozen=True, slots=True)
class SGLangConfig(AdapterSettings):
    """Settings of reuse, of the donors that are kept, and of reports.

    `resolve(SGLangConfig)` reads them. Each field says in its help what it does; docs/reference/settings.md lists them.
    """

    # The backend computes single tokens again, and sums what the query attends to, in passes of its own; the logits of a
    # pass and the keys of early layers it does not show.
    phase_cost_tokens: int = setting(
        0, "computed tokens that one more scheduler step is worth; 0 takes 96 on a CPU and 256 on a GPU", REUSE, low=0
    )
    report_file: str = setting(
        "", "file that gets one JSON line per request, for kvgraft explain", _REPORTS, may_be_empty=True
    )
    state_dir: str = setting(
        "",
        "directory of the file that says whether the backend is live; empty is kvgraft-sglang-UID in the temporary directory",
        _REPORTS,
        may_be_empty=True,
    )
