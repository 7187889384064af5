"""`kvgraft explain`: what was reused for a request, from its report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.output_files import write_whole
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.explain import ExplainedRequest
    from kvgraft.explain.text import PromptText

_VARIABLE = "KVGRAFT_REPORT_FILE"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "explain",
        help="show what was reused for a request, and why not more",
        description="Read reports out of the file that the SGLang integration writes, or out of a server's answers that hold "
        "a kvgraft object (kv_transfer_params in vLLM), or ask a server that has a page, and show one request, or list all.",
    )
    add = parser.add_argument
    add(
        "--file",
        default="",
        help=f"reports or answers as JSON, - for the standard input; without it {_VARIABLE} names it",
    )
    add(
        "--server",
        metavar="URL",
        default="",
        help="ask kvgraft serve --ui, or kvgraft ui, such as http://127.0.0.1:8000; KVGRAFT_UI_KEY is the page's key",
    )
    add("--request-id", default="", metavar="ID", help="the request's id, or how it begins; without it all are listed")
    add("--diff", nargs=2, default=(), metavar="ID", help="compare two requests")
    add("--html", metavar="FILE", help="write a page into this file, which needs nothing else")
    add("--text", action="store_true", help="show the prompt's text, too; needs --tokenizer")
    add("--tokenizer", default="", metavar="DIR", help="show the text, too, with this model's tokenizer.json")
    add("--prompt", metavar="FILE", help="the prompt as the model read it, where the report has no token ids")
    add("--json", action="store_true", help="print the report as it is")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Find and show; 1 if no such request is in the file."""
    from kvgraft.explain.terminal import overview_lines

    _check(args)
    name, known = _known(args)
    asked = [args.request_id] if args.request_id else list(args.diff)
    if not asked and len(known) > 1:
        _check_all(args, name, len(known))
        print("\n".join(overview_lines(known)))
        return 0
    found = [_latest(known, request_id) for request_id in asked] or known
    missing = [request_id for request_id, request in zip(asked, found, strict=False) if request is None]
    if missing:
        print(f"no request {missing[0]} in {name}", file=sys.stderr if args.json else sys.stdout)
        return 1
    _show(args, [request for request in found if request is not None])
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigError: There are such.
    """
    for option in ("prompt", "text"):
        if getattr(args, option) and not args.tokenizer:
            raise ConfigError(f"--{option} needs --tokenizer, a folder with the tokenizer.json of the model")
    if args.diff and args.request_id:
        raise ConfigError("--diff names two requests by itself; leave --request-id out")
    for first, second in (("json", "diff"), ("json", "html")):
        if getattr(args, first) and getattr(args, second):
            raise ConfigError(f"--{first} prints the report of one request; leave --{second} out")


def _check_all(args: argparse.Namespace, name: str, count: int) -> None:
    """Refuse to list requests where one was to be shown in another way.

    Raises:
        ConfigError: It was.
    """
    for option in ("html", "json", "tokenizer"):
        if getattr(args, option):
            raise ConfigError(
                f"{name} has {count:,} requests; --{option} is for one, which --request-id names; without it they are listed"
            )


def _known(args: argparse.Namespace) -> tuple[str, list[ExplainedRequest]]:
    """Return the source of the reports, in words, and its requests."""
    from kvgraft.explain import read_requests
    from kvgraft.explain.live import read_server

    if args.server and args.file:
        raise ConfigError("reports come from --file or from --server; give one")
    if args.server:
        found = read_server(args.server, key=os.environ.get("KVGRAFT_UI_KEY", ""), name=args.request_id)
        return args.server, found
    name = args.file or os.environ.get(_VARIABLE, "")
    if not name:
        raise ConfigError(f"no report file is given; pass --file or --server, or set {_VARIABLE}")
    return name, read_requests(_read(name), name)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text, which reports are: {error.reason} at byte {error.start}"
        ) from error


def _latest(known: Sequence[ExplainedRequest], request_id: str) -> ExplainedRequest | None:
    return next((request for request in reversed(known) if request.request_id.startswith(request_id)), None)


def _show(args: argparse.Namespace, requests: Sequence[ExplainedRequest]) -> None:
    from kvgraft.explain.page import page
    from kvgraft.explain.terminal import difference_lines, request_lines

    text = _text(args, requests[0])
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if args.html:
        try:
            write_whole(Path(args.html), page(requests, text=text))
        except OSError as error:
            raise ConfigError(f"{args.html} cannot be written: {error.strerror or error}") from error
        print(f"wrote {args.html}")
    elif args.json:
        print(json.dumps({"attempts": [dict(attempt.raw) for attempt in requests[0].attempts]}, indent=1))
    elif len(requests) > 1:
        print("\n".join(difference_lines(requests[0], requests[1], colour=colour)))
    else:
        print("\n".join(request_lines(requests[0], colour=colour, text=text)))


def _text(args: argparse.Namespace, request: ExplainedRequest) -> PromptText | None:
    if not args.tokenizer:
        return None
    from kvgraft.explain.text import prompt_text

    return prompt_text(request, args.tokenizer, Path(args.prompt) if args.prompt else None)
