"""Environment variables that are settings, and those that only look like it."""

from __future__ import annotations

import difflib
import os
import re
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.config.settings import Settings

ENV_PREFIX = "KVGRAFT_"
"""Beginning of our variables' names."""

CONFIG_FILE_VARIABLE = ENV_PREFIX + "CONFIG"
"""Names the file where no flag does."""


@cache
def _readers() -> Mapping[type[Settings], str]:
    """Return the owners of settings. vLLM hands its own on to all ranks, which may have other environments.

    Imported when a variable may be theirs: an engine's process needs no settings of others.
    """
    from kvgraft.config.server import ServerConfig
    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.config.vllm import VLLMConfig

    return {
        ServerConfig: "kvgraft's own engine and server",
        SGLangConfig: "the SGLang backend",
        VLLMConfig: "the vLLM connector, which reads kv_connector_extra_config alone",
    }


_SERVICE_LINK = re.compile(r"KVGRAFT_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Variables that Kubernetes sets in pods beside a service with a name that begins with `kvgraft`."""


def variable_of(name: str) -> str:
    """Return the variable of a setting: `KVGRAFT_MIN_RUN` for `min_run`."""
    return ENV_PREFIX + name.upper()


def variables(kind: type[Settings], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the texts that variables give to settings of `kind`, by setting.

    Args:
        kind: The settings' owner.
        environ: Environment variables; None takes those of the process.

    Raises:
        ConfigError: A variable with our prefix is no setting; names the closest one.
    """
    environ = os.environ if environ is None else environ
    for variable in sorted(environ):
        if _is_strange(variable, environ[variable]):
            raise ConfigError(f"{variable} is no setting; {_hint(variable)}")
    return {name: environ[variable_of(name)] for name in kind.rules() if variable_of(name) in environ}


def ignored_variables(kind: type[Settings], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return one line for each variable that is a setting of others and changes nothing for `kind`."""
    environ = os.environ if environ is None else environ
    if not any(variable.startswith(ENV_PREFIX) for variable in environ):
        return ()
    from kvgraft.config.vllm import VLLMConfig

    own = {} if kind is VLLMConfig else kind.rules()
    readers: dict[str, list[str]] = {}
    for other, reader in _readers().items():
        for name in other.rules():
            if name not in own and not _is_link(variable_of(name), environ.get(variable_of(name), "")):
                readers.setdefault(variable_of(name), []).append(reader)
    return tuple(
        f"{variable} is ignored: it is a setting of {' and '.join(known)}"
        for variable, known in readers.items()
        if variable in environ
    )


def _is_strange(variable: str, value: str) -> bool:
    """Whether a variable has our prefix and is neither a setting of any engine nor set by Kubernetes."""
    if not variable.upper().startswith(ENV_PREFIX) or variable in _known():
        return False
    return not _is_link(variable, value)


def _is_link(variable: str, value: str) -> bool:
    return (variable.endswith("_PORT") and "://" in value) or _SERVICE_LINK.fullmatch(variable) is not None


def _known() -> list[str]:
    return [CONFIG_FILE_VARIABLE, *dict.fromkeys(variable_of(name) for kind in _readers() for name in kind.rules())]


def _hint(variable: str) -> str:
    closest = difflib.get_close_matches(variable.upper(), _known(), n=1, cutoff=0.8)
    return f"did you mean {closest[0]}?" if closest else "unset it, or see docs/reference/settings.md for what there is"
