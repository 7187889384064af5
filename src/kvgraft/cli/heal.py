"""`kvgraft heal`: have idle vLLM and SGLang servers compute approximate text again."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvgraft.cli.parser import RawDescriptionHelpFormatter
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvgraft.heal.healer import HealSettings
    from kvgraft.router import WorkerSpec

_DESCRIPTION = """\
Listen to the KV events of vLLM or SGLang servers with kvgraft in them, and when
one of them is idle send it the sessions that went on after grafts, the latest
first, and then its hottest other texts, one at a time, as prompts that graft
nothing. What the server registers of them is exact: a session's next turn finds
a prefix. Nothing else changes: no answer, and no text of requests with an
adapter or a cache salt, which events do not name.
"""
_EPILOG = """\
The servers publish KV events (--kv-events-config) and announce their donors
(announce_donors). kvgraft serve heals itself (its setting heal); there is
nothing to do for it here.

example:
  kvgraft heal --url http://127.0.0.1:8000 \\
      --events tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558

More: docs/healing.md
"""
_EXTRA = frozenset({"aiohttp", "zmq", "msgspec"})


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "heal",
        help="have idle vLLM and SGLang servers compute approximate text again",
        usage="kvgraft heal --url URL --events ENDPOINT[,OPTION ...] ... [OPTION ...]\n"
        "       kvgraft heal --worker URL,OPTION,... ... [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", metavar="URL", action="append", default=[], help="a server, without /v1; once for each")
    add(
        "--events",
        metavar="ENDPOINT[,replay=ENDPOINT][,topic=TEXT]",
        action="append",
        default=[],
        help="where it publishes KV events, and sends them again; once for each --url, in their order",
    )
    add("--worker", metavar="URL,...", action="append", default=[], help="both in one, as 'kvgraft router' takes it")
    add("--idle-s", metavar="S", type=float, default=2.0, help="seconds without a request of others before (default 2)")
    add(
        "--max-tokens-per-minute",
        metavar="N",
        type=int,
        default=100_000,
        help="tokens that a server computes for this (default 100000)",
    )
    add(
        "--priority",
        metavar="N",
        type=int,
        help="priority of these prompts, for servers with --scheduling-policy priority (vLLM: a high number comes last) "
        "or --enable-priority-scheduling (SGLang: a low one); others refuse it (default: none)",
    )
    add("--api-key", metavar="KEY", help="key that is sent to all servers (default: $OPENAI_API_KEY)")
    add(
        "--once",
        action="store_true",
        help="end when nothing is left or it was given up (exit code 1), instead of waiting for more; needs replay=",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Heal until a signal comes; 1 if with `--once` something was given up."""
    if not args.idle_s >= 0:
        raise ConfigError(f"--idle-s must be a number from 0 on, not {args.idle_s}")
    if args.max_tokens_per_minute < 1:
        raise ConfigError(f"--max-tokens-per-minute must be at least 1, not {args.max_tokens_per_minute}")
    try:
        from kvgraft.events.publisher import load_zmq
        from kvgraft.events.wire import require_msgpack
        from kvgraft.heal.healer import HealSettings
        from kvgraft.observability import log_format
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise ImportError(f"kvgraft heal needs {missing}: pip install 'kvgraft[router]'", name=missing) from error
    workers = _workers(args)
    for worker in workers:
        if worker.events is None:
            raise ConfigError(
                f"{worker.url} has no events; give --events tcp://HOST:PORT, where it publishes KV events"
            )
        if args.once and worker.replay is None:
            raise ConfigError("--once needs replay=ENDPOINT: without it nothing is known of what was announced before")
    load_zmq()
    require_msgpack()
    log_format.configure_logging("text")
    settings = HealSettings(idle_s=args.idle_s, tokens_per_minute=float(args.max_tokens_per_minute), once=args.once)
    key = os.environ.get("OPENAI_API_KEY", "") if args.api_key is None else args.api_key
    return 0 if asyncio.run(_main(workers, settings, key, args.priority)) else 1


def _workers(args: argparse.Namespace) -> tuple[WorkerSpec, ...]:
    """Return the servers that were named.

    Raises:
        ConfigError: There is none, one is named twice or in another form, or `--url` and `--events` do not go together.
    """
    from kvgraft.router import parse_worker

    if len(args.url) != len(args.events):
        raise ConfigError(
            f"--url is given {len(args.url)} times and --events {len(args.events)} times; give both for each server"
        )
    if not args.url and not args.worker:
        raise ConfigError("give --url URL and --events ENDPOINT, or --worker URL,events=ENDPOINT, once per server")
    texts = [f"{url},events={events}" for url, events in zip(args.url, args.events, strict=True)]
    workers = tuple(parse_worker(text) for text in [*texts, *args.worker])
    names = [worker.name for worker in workers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given twice; name each server once")
    urls = [_address(worker.url) for worker in workers]
    for worker, url in zip(workers, urls, strict=True):
        if urls.count(url) > 1:
            raise ConfigError(f"{worker.url} is given twice, under two names; name each server once")
    return tuple(replace(worker, graft=True) for worker in workers)


def _address(url: str) -> tuple[object, ...]:
    """Return a URL in a form that all ways to write it share."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path


async def _main(workers: tuple[WorkerSpec, ...], settings: HealSettings, api_key: str, priority: int | None) -> bool:
    from kvgraft.heal.process import heal

    closing, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # on Windows
            loop.add_signal_handler(signum, closing.set)
    return await heal(workers, settings, api_key=api_key, priority=priority, closing=closing)
