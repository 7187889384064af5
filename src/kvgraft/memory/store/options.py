"""Options after the question mark in the URL of a store: fields with `setting(...)`, parsed as all settings are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from kvgraft.config.setting import parsed
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Options = TypeVar("Options")


def read_options(name: str, kind: type[Options], options: Mapping[str, str]) -> Options:
    """Make `kind`, a dataclass of settings, of the options of a URL.

    Raises:
        ConfigError: There is no such option, or it is out of its limits.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    refuse_options(name, options, tuple(fields))
    return kind(**{key: parsed(fields[key], value) for key, value in options.items()})


def refuse_options(name: str, options: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raise `ConfigError` for an option that a store does not have."""
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"store {name!r} has no option {option!r}; {has}")
