"""Records of requests and steps, and recorders that turn them into metrics.

Public modules: `chrome_trace`, `log_format`, `stages`, and `process` and `prometheus`, which need prometheus_client.
"""

from kvgraft.observability.recorder import (
    IdleRecord,
    NullRecorder,
    Recorder,
    Recorders,
    RequestRecord,
    RequestTimes,
    StepRecord,
)

__all__ = ["IdleRecord", "NullRecorder", "Recorder", "Recorders", "RequestRecord", "RequestTimes", "StepRecord"]
