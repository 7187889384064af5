"""`kvgraft serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from kvgraft import __version__
from kvgraft.cli.model_options import add_settings, resolve_settings, silence_libraries
from kvgraft.cli.parser import RawDescriptionHelpFormatter, show_first
from kvgraft.cli.preflight import check_start
from kvgraft.cli.stages import shown_stages
from kvgraft.cli.watching import request_traces, trace_file
from kvgraft.interrupts import ending_at_interrupt, leave
from kvgraft.observability import Recorders
from kvgraft.observability.log_format import configure_logging
from kvgraft.observability.stages import stage
from kvgraft.packages import require_packages

if TYPE_CHECKING:
    import argparse
    from socket import socket

    from starlette.applications import Starlette

    from kvgraft.config import ServerConfig
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.observability.chrome_trace import ChromeTrace
    from kvgraft.observability.otel.tracing import RequestTraces

logger = logging.getLogger(__name__)

_FIRST = (
    "--config",
    "--model",
    "--served-model-name",
    "--dtype",
    "--max-model-len",
    "--reuse",
    "--kv-bytes",
    "--store",
    "--max-running",
    "--host",
    "--port",
    "--api-key",
    "--ui",
)
"""What `--help` shows: what users of other servers of models look for, and what reuse is."""
_DESCRIPTION = """\
Serve a model over HTTP as OpenAI's API does. Works without any option: the
bundled model graft-tiny on http://127.0.0.1:8000/v1. The port opens when the
model is ready.
"""
_EPILOG = """\
example:
  kvgraft serve --model ./my-model --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions \\
       -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Every option is also a key of the --config file and a variable such as
KVGRAFT_PORT. Flags win over variables, variables over the file. `kvgraft config
show` prints what is in effect. Give API keys by KVGRAFT_API_KEY: other users of
the machine can read command lines. More: docs/server.md
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        usage="kvgraft serve [--model NAME] [--port N] [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_settings(parser)
    show_first(parser, *_FIRST)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; Ctrl+C before the port opens ends the process at once."""
    with ending_at_interrupt():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    resolved = resolve_settings(args)
    config = resolved.config
    require_packages("kvgraft serve", ("starlette", "uvicorn"), "server")
    from kvgraft.http.process import bind, certificate, serve
    from kvgraft.server.context import model_id

    check_start(config)

    tls = certificate(config.ssl_certfile, config.ssl_keyfile)
    name = config.served_model_name or model_id(config.model)
    listener = bind(config.host, config.port)
    with listener, trace_file(config) as trace, request_traces(config, name) as traces:
        configure_logging(config.log_format)
        for warning in resolved.warnings:
            logger.warning("%s", warning)
        _warn_if_open(listener, config)
        # Elsewhere than on a terminal, the stages are records of the log.
        with shown_stages(config.log_format == "text" and sys.stderr is not None and sys.stderr.isatty()):
            engine, app = _started(config, name, trace, traces)
        serve(
            app,
            listener,
            grace_s=config.shutdown_grace_s,
            tls=tls,
            on_ready=lambda url: print(_ready_line(url, app.state.context.model_id, engine, config), flush=True),
        )
    if engine.is_stuck:
        leave(1)
    return 0


def _warn_if_open(listener: socket, config: ServerConfig) -> None:
    from kvgraft.http.process import is_open_to_others

    if not config.api_key and is_open_to_others(listener):
        logger.warning(
            "%s port %d lets every client in: there is no api_key; set one, or --host 127.0.0.1 for this machine alone",
            *listener.getsockname()[:2],
        )


def _started(
    config: ServerConfig, name: str, trace: ChromeTrace | None, traces: RequestTraces | None
) -> tuple[AsyncLLM, Starlette]:
    """Return the engine with its model, and the app around it; it takes seconds."""
    stage("importing torch")
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.inspector import RequestHistory
    from kvgraft.observability.prometheus import PrometheusRecorder
    from kvgraft.server import create_app

    silence_libraries()
    metrics = PrometheusRecorder(name)
    history = RequestHistory() if config.ui else None
    others = [recorder for recorder in (trace, traces, history) if recorder is not None]
    engine = AsyncLLM(config.model, config, Recorders([metrics, *others]) if others else metrics)
    return engine, create_app(engine, config, metrics, traces, history)


def _ready_line(url: str, model_id: str, engine: AsyncLLM, config: ServerConfig) -> str:
    reuse = f"reuse {config.reuse}"
    if config.reuse == "graft" and engine.graft_refusal is not None:
        reuse = f"reuse exact (graft is refused: {engine.graft_refusal})"
    slots = engine.snapshot().usage.total
    page = f", and a page at {url}/ui/" if config.ui else ""
    return (
        f"kvgraft {__version__} serves {model_id} at {url}/v1 with {slots:,} K/V slots, {reuse}{page}; Ctrl+C stops it"
    )
