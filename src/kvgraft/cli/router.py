"""`kvgraft router`: one address for several engines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft import __version__
from kvgraft.cli.parser import RawDescriptionHelpFormatter
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvgraft.router.gateway import Gateway

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Pass OpenAI requests on to the engine from which the first token is to be
expected soonest: by the text that each one holds, at the beginning of the
prompt or, if it reuses such, at any offset, and by what it has to do. Engines
say what they hold by KV events (kvgraft, vLLM, SGLang).
"""
_EPILOG = """\
a worker is URL[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT][,topic=TEXT]
            [,graft=true][,name=TEXT][,label=TEXT]
  events  where it publishes KV events; replay: where it sends them again
  graft   it reuses text at any offset and does not announce its donors
          (announce_donors)
  name    stands in metrics and in the header x-kvgraft-worker; label: what
          --header says of it

example:
  kvgraft serve --port 8001 --announce-donors true --kv-events \\
  '{"endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"tcp://127.0.0.1:5558"}'
  E=tcp://127.0.0.1
  kvgraft router --worker http://127.0.0.1:8001,events=$E:5557,replay=$E:5558

Before another gateway: --gateway http://HOST:PORT --header
X-SMG-Target-Worker. More: docs/routing.md
"""
_GRACE_S = 30.0
_EXTRA = frozenset({"aiohttp", "starlette", "uvicorn", "prometheus_client"})


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "router",
        help="one address for several engines, by the text that each one holds",
        usage="kvgraft router --worker URL[,OPTION ...] [--worker ...] [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--worker", metavar="URL,...", action="append", default=[], help="an engine; once for each")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="graft-tiny",
        help="model of the engines, for its tokenizer and chat template; none reads token ids only (default graft-tiny)",
    )
    parser.add_argument(
        "--policy",
        metavar="reuse|round_robin|prefix_hash|least_loaded",
        default="reuse",
        help="who gets a request (default reuse)",
    )
    parser.add_argument("--host", metavar="TEXT", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--port", metavar="N", type=int, default=8000, help="port to listen on; 0 takes a free one (default 8000)"
    )
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=int,
        default=256,
        help="requests that an engine may have from here; if all have as many, more are refused with 503 (default 256)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=1 << 20,
        help="tokens of text that are remembered per engine, up to 225 bytes each (default 1048576)",
    )
    parser.add_argument(
        "--sse-keep-alive-interval",
        metavar="N",
        type=int,
        default=0,
        help="seconds after which a stream in which nothing comes gets a comment, so that proxies keep it; 0 for never "
        "(default 0)",
    )
    parser.add_argument("--gateway", metavar="URL", help="send everything there instead, with --header")
    parser.add_argument("--header", metavar="NAME", help="header that names the chosen engine to the gateway")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Route until a signal comes."""
    gateway = _gateway(args)
    limits = {"port": (0, 65_535), "max_in_flight": (1, 1 << 20), "max_tokens": (1024, 1 << 30)}
    for name, (low, high) in {**limits, "sse_keep_alive_interval": (0, 3600)}.items():
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} must be between {low} and {high}, not {getattr(args, name)}")
    try:
        from kvgraft.http.process import bind, serve
        from kvgraft.observability import log_format
        from kvgraft.router import Router, parse_worker
        from kvgraft.router.app import create_app
        from kvgraft.router.context import RouterContext
        from kvgraft.router.prompts import PromptReader, load_tokenizer
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise ImportError(f"kvgraft router needs {missing}: pip install 'kvgraft[router]'", name=missing) from error
    workers = [parse_worker(text) for text in args.worker]
    with bind(args.host, args.port) as listener:
        log_format.configure_logging("text")
        router = Router(workers, policy=args.policy, max_tokens=args.max_tokens, max_in_flight=args.max_in_flight)
        try:
            tokenizer = None if args.model == "none" else load_tokenizer(args.model)
            keep_alive_s = args.sse_keep_alive_interval or None
            context = RouterContext(router, PromptReader(tokenizer), gateway, keep_alive_s=keep_alive_s)
            serve(
                create_app(context),
                listener,
                grace_s=_GRACE_S,
                on_ready=lambda url: print(_ready_line(url, router), flush=True),
            )
        finally:
            router.close()
    return 0


def _gateway(args: argparse.Namespace) -> Gateway | None:
    if not args.gateway and not args.header:
        return None
    if not args.gateway or not args.header:
        raise ConfigError(
            "--gateway and --header go together: where requests are sent, and which header names the engine"
        )
    from kvgraft.router.gateway import Gateway

    return Gateway(args.gateway.rstrip("/").removesuffix("/v1"), args.header)


def _ready_line(url: str, router: object) -> str:
    from kvgraft.router import Router

    assert isinstance(router, Router)
    up = sum(load.is_up for load in router.loads.values())
    return (
        f"kvgraft {__version__} routes {url}/v1 to {len(router.loads)} workers, of which {up} answer, "
        f"by {router.policy_name}; Ctrl+C stops it"
    )
