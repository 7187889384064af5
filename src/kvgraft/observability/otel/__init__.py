"""Spans of OpenTelemetry for requests that have ended: what HTTP tells of them, joined with what the engine recorded.

Public modules: `exchange`, and `tracing`, which needs kvgraft[otel].
"""
