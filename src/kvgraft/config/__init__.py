"""Settings: typed and checked, and the only place that reads them from the environment and from files.

`ReuseSettings` has what all engines share; `EngineConfig`, `ServerConfig`, `VLLMConfig` and `SGLangConfig` extend it.
`resolve` merges flags, environment, file and defaults. Public modules: `setting`, `sglang`.
"""

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
