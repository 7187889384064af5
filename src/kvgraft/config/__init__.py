"""Settings: typed and checked, and the only place that reads them from the environment and from files.

`ReuseSettings` has what all engines share; `EngineConfig`, `ServerConfig`, `VLLMConfig` and `SGLangConfig` extend it.
`resolve` merges flags, environment, file and defaults. Public modules: `setting`, `sglang`, `stores`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.on_use import names_on_use

if TYPE_CHECKING:
    from kvgraft.config.engine import EngineConfig
    from kvgraft.config.environment import ignored_variables, variables
    from kvgraft.config.machine import available_memory, check_host_memory, physical_memory
    from kvgraft.config.reuse import ReuseSettings
    from kvgraft.config.server import ServerConfig, page_key
    from kvgraft.config.setting import is_text, quoted, rule_of
    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.config.sources import Resolved, file_errors, resolve
    from kvgraft.config.table import default_text, grouped_settings, settings_table
    from kvgraft.config.vllm import VLLMConfig

__all__ = [
    "EngineConfig",
    "Resolved",
    "ReuseSettings",
    "SGLangConfig",
    "ServerConfig",
    "VLLMConfig",
    "available_memory",
    "check_host_memory",
    "default_text",
    "file_errors",
    "grouped_settings",
    "ignored_variables",
    "is_text",
    "page_key",
    "physical_memory",
    "quoted",
    "resolve",
    "rule_of",
    "settings_table",
    "variables",
]

__getattr__ = names_on_use(
    __name__,
    {
        "EngineConfig": "kvgraft.config.engine",
        "Resolved": "kvgraft.config.sources",
        "ReuseSettings": "kvgraft.config.reuse",
        "SGLangConfig": "kvgraft.config.sglang",
        "ServerConfig": "kvgraft.config.server",
        "VLLMConfig": "kvgraft.config.vllm",
        "available_memory": "kvgraft.config.machine",
        "check_host_memory": "kvgraft.config.machine",
        "default_text": "kvgraft.config.table",
        "file_errors": "kvgraft.config.sources",
        "grouped_settings": "kvgraft.config.table",
        "ignored_variables": "kvgraft.config.environment",
        "is_text": "kvgraft.config.setting",
        "page_key": "kvgraft.config.server",
        "physical_memory": "kvgraft.config.machine",
        "quoted": "kvgraft.config.setting",
        "resolve": "kvgraft.config.sources",
        "rule_of": "kvgraft.config.setting",
        "settings_table": "kvgraft.config.table",
        "variables": "kvgraft.config.environment",
    },
)
