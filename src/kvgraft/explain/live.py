"""Requests of a running server, out of the inspector's page."""

from __future__ import annotations

import re
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode

from kvgraft.errors import ConfigError
from kvgraft.explain.requests import read_requests

if TYPE_CHECKING:
    from kvgraft.explain.requests import ExplainedRequest

_PATIENCE_S = 30.0
_MOST_BYTES = 1 << 26


def read_server(url: str, *, key: str = "", name: str = "") -> list[ExplainedRequest]:
    """Read the last requests of `kvgraft serve --ui` or of `kvgraft ui`, 200 at most, the newest last.

    Args:
        url: Of the server, such as `http://127.0.0.1:8000`, or of its page.
        key: The page's; empty where it has none.
        name: Part of the name of those that are wanted; empty takes all.

    Raises:
        ConfigError: No server answers there, there is no page, the key is wrong, or no such request is known.
    """
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise ConfigError(f"a server is named by a URL such as http://127.0.0.1:8000, not {url}")
    base = url.rstrip("/").removesuffix("/ui")
    asked = urllib.request.Request(f"{base}/ui/api/reports?{urlencode({'text': name})}")
    if key:
        asked.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(_Stays).open(asked, timeout=_PATIENCE_S) as answer:
            body: bytes = answer.read(_MOST_BYTES)
    except HTTPError as error:
        with error:
            raise ConfigError(f"{base} does not show its requests: {_refusal(error)}") from error
    except HTTPException as error:  # it ended in the middle of an answer, or does not speak HTTP
        raise ConfigError(
            f"{base} gave no whole answer ({type(error).__name__}); is it a server of kvgraft?"
        ) from error
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(
            f"{base} cannot be asked ({getattr(error, 'reason', error)}); is the server running?"
        ) from error
    text = body.decode(errors="replace")
    if text.strip() == "[]":
        raise ConfigError(f"{base} knows no request {name}".rstrip() + "; it keeps the last ones, from its start on")
    return read_requests(text, base)


class _Stays(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: the key is this server's."""

    def redirect_request(self, *_: object) -> None:
        """Follow nothing."""


def _refusal(error: HTTPError) -> str:
    if error.code == HTTPStatus.UNAUTHORIZED:
        return "the page's key is needed; set KVGRAFT_UI_KEY"
    if error.code == HTTPStatus.FORBIDDEN:
        return "without a key its page is for its own machine alone; start it with a ui_key"
    if error.code == HTTPStatus.NOT_FOUND:
        return "it has no page; start it with --ui, or ask kvgraft ui"
    return f"it answered {error.code} {error.reason}"
