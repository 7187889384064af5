"""Settings of the server: those of the engine, and how it is reached."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.config.engine import MODEL, EngineConfig
from kvgraft.config.reuse import mode_setting
from kvgraft.config.setting import setting
from kvgraft.errors import ConfigError

SERVER = "server"


@dataclass(frozen=True, slots=True)
class ServerConfig(EngineConfig):
    """All settings of `kvgraft serve`."""

    model: str = setting("graft-tiny", "graft-tiny, smollm2-135m, a directory, a GGUF file or a hub id", MODEL)
    served_model_name: str = setting(
        "",
        "name of the model in the API; empty takes that of the directory or file, or the hub id",
        MODEL,
        may_be_empty=True,
    )
    reuse: str = mode_setting()
    tool_parser: str = setting(
        "auto",
        "form in which the model writes calls of tools; auto reads it in the chat template; with auto or json, tools "
        "that the template does not show are described in a system message, and called in json",
        MODEL,
        choices=("auto", "hermes", "json", "llama", "mistral"),
    )
    chat_special_tokens: str = setting(
        "text",
        "what special tokens such as <|im_end|> are where messages spell them: text, or control tokens, with which a client "
        "that writes a part of a message can forge turns",
        MODEL,
        choices=("text", "control"),
    )
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network", SERVER)
    port: int = setting(8000, "port to listen on; 0 takes a free one", SERVER, low=0, high=65_535)
    api_key: tuple[str, ...] = setting(
        (), "keys that clients may present, separated by commas; none lets all clients in", SERVER, secret=True
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "origins whose web pages browsers let in, separated by commas; * lets all in",
        SERVER,
        pattern=(r"\*|https?://[^/\s]+", "* or origins such as https://app.example.org, without a path"),
    )
    ssl_certfile: str = setting(
        "",
        "PEM file of the certificate and those that signed it, to serve HTTPS; empty is HTTP",
        SERVER,
        may_be_empty=True,
    )
    ssl_keyfile: str = setting(
        "", "PEM file of the certificate's private key; empty if it is in ssl_certfile", SERVER, may_be_empty=True
    )
    max_body_bytes: int = setting(4 << 20, "largest request body; more is refused with 413", SERVER, low=1, size=True)
    sse_keep_alive_interval: float = setting(
        15.0,
        "seconds of silence after which a stream gets a comment, from the admission of its request on; 0 sends none",
        SERVER,
        low=0,
        high=86_400,
    )
    shutdown_grace_s: float = setting(
        30.0, "seconds that running requests may go on after SIGTERM", SERVER, low=0, high=86_400
    )
    log_format: str = setting("text", "form of log lines", SERVER, choices=("text", "json"))
    ui: bool = setting(False, "show requests, donors and memory on a page at /ui/", SERVER)
    ui_key: str = setting(
        "",
        "key of that page, its password in browsers; empty takes the one API key, and without any lets this machine in alone",
        SERVER,
        secret=True,
        may_be_empty=True,
    )
    otlp_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector that gets a span of every answer, such as http://localhost:4318; empty sends none",
        SERVER,
        may_be_empty=True,
        url=True,
        pattern=(r"|https?://[^/\s]+\S*", "a URL such as http://localhost:4318"),
    )
    trace_out: str = setting(
        "",
        "file for Chrome trace events of steps and requests, which Perfetto opens; empty writes none",
        SERVER,
        may_be_empty=True,
    )


def page_key(config: ServerConfig) -> str:
    """Key of the inspector's page: its own, or the one that all clients have; empty lets this machine alone in.

    Raises:
        ConfigError: There are several API keys and none for the page, which shows requests of all of them.
    """
    if config.ui_key or not config.api_key:
        return config.ui_key
    if len(config.api_key) > 1:
        raise ConfigError(
            "ui shows requests of all API keys, of which there are several; give the page a ui_key of its own"
        )
    return config.api_key[0]
