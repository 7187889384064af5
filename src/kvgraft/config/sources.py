"""Where values come from. Precedence: flags, then the environment, then a file, then defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvgraft.config.environment import CONFIG_FILE_VARIABLE, ignored_variables, variable_of, variables
from kvgraft.config.file import read_settings
from kvgraft.config.server import ServerConfig
from kvgraft.config.setting import parsed
from kvgraft.config.settings import Settings
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[SettingsT]):
    """Effective settings.

    Attributes:
        config: The settings.
        origins: By setting, where its value came from: `default`, a file, a variable or a flag.
        warnings: One line each: variables that are settings of another engine, and settings that file and variable give.
    """

    config: SettingsT
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()


def resolve(
    kind: type[SettingsT],
    flags: Mapping[str, object] | None = None,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved[SettingsT]:
    """Merge all sources of the settings of one engine or server.

    Args:
        kind: The settings' owner.
        flags: Settings given on the command line, by name.
        config_file: A YAML or JSON file; None reads `KVGRAFT_CONFIG`.
        environ: Environment variables; None takes those of the process.

    Raises:
        ConfigError: A value is wrong, and the message begins with where it came from; or a variable with our prefix is
            no setting's name.
        ImportError: A YAML file is given and PyYAML is not installed.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get(CONFIG_FILE_VARIABLE) or None
    in_file = {} if config_file is None else read_settings(config_file)
    in_environment = variables(kind, environ)
    given: list[tuple[str, str, object]] = [(str(config_file), name, value) for name, value in in_file.items()]
    given += [(variable_of(name), name, value) for name, value in in_environment.items()]
    given += [("--" + name.replace("_", "-"), name, value) for name, value in (flags or {}).items()]
    origins, values = dict.fromkeys(kind.rules(), "default"), dict[str, object]()
    for origin, name, value in given:
        try:
            values[name] = parsed(kind.field(name), value)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
        origins[name] = origin
    twice = [
        f"{variable_of(name)} is taken instead of {name} in {config_file}" for name in in_environment if name in in_file
    ]
    return Resolved(kind.from_dict(values), origins, (*ignored_variables(kind, environ), *twice))


def file_errors(config_file: str) -> list[str]:
    """Return what is wrong with a file, one line per setting; empty if all is well."""
    try:
        values = read_settings(config_file)
    except ConfigError as error:
        return [str(error)]
    errors = []
    for name, value in values.items():
        try:
            parsed(ServerConfig.field(name), value)
        except ConfigError as error:
            errors.append(f"{config_file}: {error}")
    if errors:
        return errors
    try:
        ServerConfig.from_dict(values)
    except ConfigError as error:
        errors.append(f"{config_file}: {error}")
    return errors
