"""The OpenAI-compatible server: an ASGI app over `AsyncLLM`, and the process that serves it.

Public modules: `context`.
"""

from __future__ import annotations

try:
    from kvgraft.server.app import create_app
    from kvgraft.server.process import bind, serve
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing in {"starlette", "uvicorn", "anyio", "h11"}:
        raise ImportError(f"kvgraft.server needs {missing}: pip install 'kvgraft[server]'", name=missing) from error
    raise

__all__ = ["bind", "create_app", "serve"]
