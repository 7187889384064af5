"""The OpenAI-compatible server: an ASGI app over `AsyncLLM`.

`create_app` is loaded when it is used: the names of the package are asked for before torch is there.

Public modules: `aliases`, `body_fields`, `context`, `given_prompts`, `rendering`, `truncation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.server.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> object:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvgraft.server import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in {"starlette", "uvicorn", "anyio", "h11"}:
            raise ImportError(f"kvgraft.server needs {missing}: pip install 'kvgraft[server]'", name=missing) from error
        raise
    return app.create_app
