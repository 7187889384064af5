"""The OpenAI-compatible server: an ASGI app over `AsyncLLM`, and the process that serves it.

What the package exports is loaded when it is used: the modules that know HTTP and no engine serve the router as well,
which runs without one.

Public modules: `access_log`, `body`, `chat_template`, `context`, `disconnect`, `errors`, `fields`, `json_io`,
`messages`, `process`,
`template_fields`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.server.app import create_app
    from kvgraft.server.process import bind, certificate, serve

__all__ = ["bind", "certificate", "create_app", "serve"]

_HOMES = {"bind": "process", "certificate": "process", "create_app": "app", "serve": "process"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in {"starlette", "uvicorn", "anyio", "h11"}:
            raise ImportError(f"kvgraft.server needs {missing}: pip install 'kvgraft[server]'", name=missing) from error
        raise
