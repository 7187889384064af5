"""Endpoints of OpenAI's API that this server does not have, and what to use instead."""

from __future__ import annotations

from kvgraft.http.errors import APIError

_EMBEDDINGS = "send these requests to a server of an embedding model, such as vLLM or text-embeddings-inference"
_TEXT_ONLY = "this server answers in text"
_NOTHING_KEPT = "this server keeps no requests, answers or files; send each request by itself"
_INSTEAD = {
    "embeddings": _EMBEDDINGS,
    "rerank": _EMBEDDINGS,
    "score": _EMBEDDINGS,
    "moderations": "ask a moderation service",
    "images": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "videos": _TEXT_ONLY,
    "realtime": "stream the answers of /v1/chat/completions",
    "files": _NOTHING_KEPT,
    "batches": _NOTHING_KEPT,
    "conversations": _NOTHING_KEPT,
    "assistants": _NOTHING_KEPT,
    "threads": _NOTHING_KEPT,
    "vector_stores": _NOTHING_KEPT,
    "fine_tuning": "this server does not train; train elsewhere and serve the result",
}
"""By the first part of the path after `/v1/`."""


def absent_endpoint(path: str) -> APIError | None:
    """Return the error of a path that other servers have; None for an unknown path."""
    root, _, rest = path.removeprefix("/").partition("/")
    name = rest.partition("/")[0]
    if root != "v1" or name not in _INSTEAD:
        return None
    return APIError(404, f"/v1/{name} is not served; {_INSTEAD[name]}", code="endpoint_not_supported")
