"""Texts by worker, and the choice of a worker for a request: `kvgraft router` as a library. Needs the extra `router`.

Public modules: `app`, `context`, `forward`, `gateway`, `load`, `parity`, `policy`, `prompts`, `sequence`, `subscriber`,
`worker`.
"""

from __future__ import annotations

from kvgraft.router.core import NoWorkerError, Router, WorkerChoice
from kvgraft.router.directory import WorkerScore
from kvgraft.router.policy import POLICIES, Prompt
from kvgraft.router.worker import WorkerSpec, parse_worker

__all__ = ["POLICIES", "NoWorkerError", "Prompt", "Router", "WorkerChoice", "WorkerScore", "WorkerSpec", "parse_worker"]
