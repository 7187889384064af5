"""`kvgraft ui`: the inspector's page over a report file and a metrics URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft import __version__
from kvgraft.cli.parser import RawDescriptionHelpFormatter
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_DESCRIPTION = """\
Show requests and figures of a server on a page, out of the reports that it
writes and the metrics that it serves: vLLM, SGLang, or kvgraft elsewhere.
`kvgraft serve --ui` has the same page of its own, which sees more.
"""
_EPILOG = """\
example:
  kvgraft ui --reports reports.jsonl --metrics http://127.0.0.1:30000/metrics

KVGRAFT_REPORT_FILE names the reports, too, and KVGRAFT_UI_KEY the page's key,
without which only this machine may look. More: docs/inspector.md
"""
_EXTRA = frozenset({"starlette", "uvicorn", "prometheus_client"})


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "ui",
        help="a page that shows requests and figures of a server",
        usage="kvgraft ui [--reports FILE] [--metrics URL] [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--reports", metavar="FILE", default="", help="reports, a JSON line each, read on as they are written")
    add("--metrics", metavar="URL", default="", help="where the server has its metrics")
    add("--host", metavar="TEXT", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", metavar="N", type=int, default=8010, help="port to listen on; 0 takes a free one (default 8010)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the page until a signal comes."""
    reports = args.reports or os.environ.get("KVGRAFT_REPORT_FILE", "")
    if not reports and not args.metrics:
        raise ConfigError("there is nothing to show; give --reports FILE, --metrics URL or both")
    if args.metrics and not re.fullmatch(r"https?://\S+", args.metrics):
        raise ConfigError(f"--metrics must be a URL such as http://127.0.0.1:30000/metrics, not {args.metrics}")
    if not 0 <= args.port <= 65_535:
        raise ConfigError(f"--port must be between 0 and 65535, not {args.port}")
    try:
        from kvgraft.http.process import bind, serve
        from kvgraft.inspector import FileSource, inspector_server
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise ImportError(f"kvgraft ui needs {missing}: pip install 'kvgraft[server]'", name=missing) from error
    source = FileSource(Path(reports) if reports else None, args.metrics)
    with bind(args.host, args.port) as listener:
        serve(
            inspector_server(source, os.environ.get("KVGRAFT_UI_KEY", "")),
            listener,
            grace_s=0.0,
            on_ready=lambda url: print(_ready_line(url, source.name), flush=True),
        )
    return 0


def _ready_line(url: str, name: str) -> str:
    return f"kvgraft {__version__} shows {name} at {url}/ui/; Ctrl+C stops it"
