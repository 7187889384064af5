"""Where values come from. Precedence: flags, then the environment, then a file, then defaults."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.config.file import read_settings
from kvgraft.config.server import ServerConfig
from kvgraft.config.settings import ENV_PREFIX
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE_VARIABLE = ENV_PREFIX + "CONFIG"
"""Names the file where no flag does."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Effective settings.

    Attributes:
        config: The settings.
        origins: By setting, where its value came from: `default`, a file, a variable or a flag.
        warnings: One line each, about variables that look like settings and are none.
    """

    config: ServerConfig
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()


def resolve(
    flags: Mapping[str, object], config_file: str | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:
    """Merge all sources.

    Args:
        flags: Settings given on the command line, by name.
        config_file: A YAML or JSON file; None reads `KVGRAFT_CONFIG`.
        environ: Environment variables; None takes those of the process.

    Raises:
        ConfigError: A value is wrong; the message begins with where it came from.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get(CONFIG_FILE_VARIABLE) or None
    config, origins = ServerConfig(), dict.fromkeys(ServerConfig.rules(), "default")
    variables = {ENV_PREFIX + name.upper(): name for name in origins}
    given: list[tuple[str, str, object]] = []
    if config_file is not None:
        given += [(config_file, name, value) for name, value in read_settings(config_file).items()]
    given += [(variable, name, environ[variable]) for variable, name in variables.items() if variable in environ]
    given += [("--" + name.replace("_", "-"), name, value) for name, value in flags.items()]
    for origin, name, value in given:
        try:
            config = config.updated({name: value})
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
        origins[name] = origin
    return Resolved(config, origins, _strangers(environ, [*variables, CONFIG_FILE_VARIABLE]))


def file_errors(config_file: str) -> list[str]:
    """Return what is wrong with a file, one line per setting; empty if all is well."""
    try:
        values = read_settings(config_file)
    except ConfigError as error:
        return [str(error)]
    errors = []
    for name, value in values.items():
        try:
            ServerConfig().updated({name: value})
        except ConfigError as error:
            errors.append(f"{config_file}: {error}")
    return errors


def _strangers(environ: Mapping[str, str], known: list[str]) -> tuple[str, ...]:
    """Warn of variables close to a known name; others with the prefix may belong to somebody else."""
    warnings = []
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            closest = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            warnings += [f"{variable} is no setting and was ignored; did you mean {closest[0]}?"] if closest else []
    return tuple(warnings)
