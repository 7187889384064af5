"""Embedders by name, and those of third parties through entry points."""

from __future__ import annotations

from typing import Protocol

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.factories import NamedFactories
from kvgraft.semantic.base import Decoder, Embedder
from kvgraft.semantic.minhash import MinHashSketch
from kvgraft.semantic.minilm import minilm_embedder, require_minilm
from kvgraft.semantic.tfidf import TfIdfSketch


class EmbedderFactory(Protocol):
    """Makes an embedder."""

    def __call__(self, *, decode: Decoder | None, path: str) -> Embedder:
        """Make an embedder.

        Args:
            decode: Turns token ids into text; None where there is nothing that could.
            path: The part after the colon in `NAME:PATH`, a directory of weights say; empty for none.

        Raises:
            ConfigError: It cannot be made with these; names the remedy.
            ImportError: A package is missing; names it.
        """
        ...


def _minhash(*, decode: Decoder | None, path: str) -> Embedder:
    del decode
    _refuse_path("minhash", path)
    return MinHashSketch()


def _tfidf(*, decode: Decoder | None, path: str) -> Embedder:
    del decode
    _refuse_path("tfidf", path)
    return TfIdfSketch()


_FACTORIES: NamedFactories[EmbedderFactory] = NamedFactories(
    "embedder",
    "kvgraft.embedders",
    "register_embedder",
    {"minhash": _minhash, "minilm": minilm_embedder, "tfidf": _tfidf},
)


def register_embedder(name: str, factory: EmbedderFactory) -> None:
    """Make `factory` known under `name`.

    Raises:
        ConfigError: The name is empty, blank, has a colon, means no embedder or is taken.
    """
    if not name.strip() or ":" in name or name == "none":
        raise ConfigError(f"an embedder needs a name without a colon that is neither empty nor 'none', not {name!r}")
    _FACTORIES.register(name, factory)


def create_embedder(name: str, decode: Decoder | None = None) -> Embedder:
    """Make the embedder `NAME` or `NAME:PATH`, registered or offered by an installed package (group `kvgraft.embedders`).

    Raises:
        ConfigError: There is no such embedder, or it cannot be made.
        ImportError: A package that it needs is missing.
        IntegrationError: Its entry point cannot be imported, or what it makes is no `Embedder`.
    """
    name, _, path = name.partition(":")
    embedder: object = _FACTORIES.find(name)(decode=decode, path=path)
    if not isinstance(embedder, Embedder):
        raise IntegrationError(f"embedder {name!r} is a {type(embedder).__name__}; its factory must return an Embedder")
    return embedder


def require_embedder(setting: str) -> None:
    """Refuse an embedder that cannot be made here for want of a name, a package or files, before a model is loaded.

    Args:
        setting: `NAME`, `NAME:PATH` or `none`.

    Raises:
        ConfigError: There is no such embedder, or it has no files.
        ImportError: A package is missing; names the extra.
        IntegrationError: Its entry point cannot be imported.
    """
    name, _, path = setting.partition(":")
    if name != "none" and _FACTORIES.find(name) is minilm_embedder:
        require_minilm(path)


def _refuse_path(name: str, path: str) -> None:
    if path:
        raise ConfigError(f"embedder {name!r} reads no files; leave ':{path}' out")
