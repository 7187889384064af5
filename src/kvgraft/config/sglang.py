"""Settings of `--radix-cache-backend kvgraft` in an SGLang server: from a file and the environment, no SGLang flags."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvgraft.config.file import read_settings
from kvgraft.config.setting import setting
from kvgraft.config.settings import ENV_PREFIX, Settings
from kvgraft.config.sources import CONFIG_FILE_VARIABLE
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

REUSE, DONORS, REPORTS = "reuse", "donors", "reports"


@dataclass(frozen=True, slots=True)
class SGLangConfig(Settings):
    """What is reused, which donors are kept, and where reports go.

    Each field says in its help what it does; docs/integrations/sglang.md lists them.
    """

    selection: str = setting(
        "first_k", "policy that chooses reused tokens to compute again", REUSE, choices=("none", "first_k")
    )
    first_k: int = setting(16, "tokens per run that first_k computes again", REUSE, low=1)
    min_run: int = setting(
        16, "shortest run of equal tokens that is reused, and shortest text that becomes a donor", REUSE, low=16
    )
    max_generation: int = setting(
        2, "highest generation of a donor: 0 is text computed behind exact K/V, g + 1 behind donors of g", REUSE, low=0
    )
    phase_cost_tokens: int = setting(
        0, "computed tokens that one more scheduler step is worth; 0 takes 32 on a CPU and 256 on a GPU", REUSE, low=0
    )
    lookup_deadline_ms: float = setting(
        20.0,
        "longest that the lookup for one request may take, on one rank; longer prompts are computed instead",
        REUSE,
        above=0,
    )
    donor_tokens: int = setting(1 << 22, "tokens that the donor catalogue may hold in all tiers", DONORS, low=16)
    host_bytes: int = setting(
        1 << 30, "host memory for donors that SGLang evicts, per rank; 0 keeps none", DONORS, low=0, size=True
    )
    semantic_provider: str = setting(
        "",
        "SemanticPrefixProvider to ask on a miss, as module:Class; its K/V is substituted, never published",
        REUSE,
        may_be_empty=True,
        pattern=(r"|[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:Class"),
    )
    report_file: str = setting(
        "", "file that gets one JSON line per request, for kvgraft explain", REPORTS, may_be_empty=True
    )
    state_dir: str = setting(
        "",
        "directory of the file that says whether the backend is live; empty is the user's in /tmp",
        REPORTS,
        may_be_empty=True,
    )

    @classmethod
    def resolve(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Build from defaults, then the file that `KVGRAFT_CONFIG` names, then variables such as `KVGRAFT_MIN_RUN`.

        Raises:
            ConfigError: A value is wrong; the message begins with where it came from.
        """
        environ = os.environ if environ is None else environ
        config, file_name = cls(), environ.get(CONFIG_FILE_VARIABLE)
        if file_name:
            try:
                config = config.updated(read_settings(file_name))
            except ConfigError as error:
                raise ConfigError(f"{file_name}: {error}") from error
        for name in cls.rules():
            variable = ENV_PREFIX + name.upper()
            if variable not in environ:
                continue
            try:
                config = config.updated({name: environ[variable]})
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}") from error
        return config

    @classmethod
    def remarks(cls, environ: Mapping[str, str] | None = None) -> list[str]:
        """Say in one line each which variables nobody reads and which settings are given twice; raises as `resolve` does."""
        environ = os.environ if environ is None else environ
        file_name = environ.get(CONFIG_FILE_VARIABLE)
        in_file = read_settings(file_name) if file_name else {}
        lines = []
        for variable in sorted(environ):
            name = variable.upper().removeprefix(ENV_PREFIX).lower()
            if not variable.upper().startswith(ENV_PREFIX) or variable == CONFIG_FILE_VARIABLE:
                continue
            if name not in cls.rules():
                lines.append(f"{variable} is ignored: {cls._unknown(name)}")
            elif variable != variable.upper():
                lines.append(f"{variable} is ignored: did you mean {variable.upper()}?")
            elif name in in_file:
                lines.append(f"{variable}={environ[variable]} is taken instead of {name} in {file_name}")
        return lines

    @classmethod
    def _unknown(cls, name: str) -> str:
        try:
            cls.field(name)
        except ConfigError as error:
            return str(error)
        return ""
