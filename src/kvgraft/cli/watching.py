"""Recorders that settings ask for, for as long as a command runs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvgraft.config import ServerConfig
    from kvgraft.observability.chrome_trace import ChromeTrace
    from kvgraft.observability.otel.tracing import RequestTraces


def trace_file(config: ServerConfig) -> AbstractContextManager[ChromeTrace | None]:
    """Return the recorder of `trace_out`, whose file ends with the context; None where nothing is to be written.

    Raises:
        ConfigError: The file cannot be written.
    """
    if not config.trace_out:
        return nullcontext()
    from kvgraft.observability.chrome_trace import ChromeTrace

    return ChromeTrace(Path(config.trace_out))


def request_traces(config: ServerConfig, model: str) -> AbstractContextManager[RequestTraces | None]:
    """Return the recorder of `otlp_endpoint`, which ends with the context; None where no spans are to be sent.

    Raises:
        ImportError: The extra `otel` is not installed.
    """
    if not config.otlp_endpoint:
        return nullcontext()
    from kvgraft.observability.otel.tracing import open_traces

    return open_traces(config.otlp_endpoint, model)
