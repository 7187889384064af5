"""A worker as it is written on the command line: `URL,events=tcp://..,replay=tcp://..,graft=true`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from urllib.parse import urlsplit

from kvgraft.config import quoted
from kvgraft.errors import ConfigError

_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """An engine behind the router.

    Attributes:
        url: Where it serves OpenAI's API, without `/v1`.
        events: ZMQ endpoint of its KV events; None if it publishes none, and then it has credit for nothing.
        replay: ZMQ endpoint that sends them again; None if there is none.
        topic: Prefix of the events' topic.
        graft: It reuses text at any offset, and may not announce its donors.
        name: Stands in metrics, scores and the header `x-kvgraft-worker`; by default host and port.
        label: What a gateway knows it by, in the header that names the target; by default its URL.
    """

    url: str
    events: str | None = None
    replay: str | None = None
    topic: str = ""
    graft: bool = False
    name: str = ""
    label: str = field(default="")

    def __post_init__(self) -> None:
        require_url(self.url, "a worker begins with its URL")
        if self.replay and not self.events:
            raise ConfigError(f"worker {quoted(self.url)} has replay= without events=; give both")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))
        object.__setattr__(self, "name", self.name or urlsplit(self.url).netloc)
        object.__setattr__(self, "label", self.label or self.url)
        for what in ("name", "label"):
            text = getattr(self, what)
            if not (text.isascii() and text.isprintable()):
                raise ConfigError(
                    f"{what} of a worker stands in a header; {quoted(text)} has other characters than ASCII"
                )


def require_url(url: str, what: str) -> None:
    """Refuse what is no URL of a server; `what` begins the sentence.

    Raises:
        ConfigError: It is none, or has credentials in it, which names and scores would show to every client.
    """
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ConfigError(f"{what}, such as http://127.0.0.1:8001; this one has no port that can be") from None
    if "@" in parts.netloc:
        raise ConfigError(f"{what} without user and password; clients send their keys themselves")
    if not is_server or parts.query or parts.fragment or not url.isascii() or " " in url:
        raise ConfigError(f"{what}, such as http://127.0.0.1:8001, not {quoted(url)}")


def parse_worker(text: str) -> WorkerSpec:
    """Read a worker from one argument.

    Raises:
        ConfigError: It begins with no URL, or has an option that there is not; names what there is.
    """
    url, *options = text.split(",")
    worker = WorkerSpec(url)
    known = {each.name for each in fields(WorkerSpec)} - {"url"}
    given: dict[str, str | bool] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in known or not value:
            raise ConfigError(
                f"a worker has no option {quoted(option)}; write {', '.join(sorted(known))}, each as NAME=VALUE"
            )
        if name == "graft" and value not in ("true", "false"):
            raise ConfigError(f"graft of a worker is true or false, not {quoted(value)}")
        if name in ("events", "replay") and not _is_endpoint(value):
            raise ConfigError(f"{name} of a worker is a ZMQ endpoint such as tcp://127.0.0.1:5557, not {quoted(value)}")
        if name in given:
            raise ConfigError(f"{name} of worker {quoted(url)} is given twice; keep one")
        given[name] = value == "true" if name == "graft" else value
    return replace(worker, **({"name": "", "label": ""} | given))  # type: ignore[arg-type]


def _is_endpoint(text: str) -> bool:
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp":
        return bool(host) and port.isdecimal() and 0 < int(port) <= _LAST_PORT
    return scheme in ("ipc", "inproc") and bool(rest)


def require_distinct(workers: tuple[WorkerSpec, ...]) -> None:
    """Refuse an empty list and two workers of one name.

    Raises:
        ConfigError: It is so.
    """
    if not workers:
        raise ConfigError("a router needs workers; give --worker URL, once per worker")
    names = [worker.name for worker in workers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two workers have the name {quoted(name)}; give one of them another with name=NAME")
