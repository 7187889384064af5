"""Spans of OpenTelemetry for requests that have ended: the HTTP exchange, joined with the engine's records.

Public modules: `exchange`, and `tracing`, which needs kvgraft[otel].
"""
