"""Settings: one typed configuration for the engine and the server, and the only place that reads the environment.

`EngineConfig`, `ServerConfig` and the adapters' classes say what there is; `resolve` merges flags, environment, file and
defaults.
"""

from kvgraft.config.engine import EngineConfig
from kvgraft.config.server import ServerConfig
from kvgraft.config.setting import quoted, rule_of
from kvgraft.config.sglang import SGLangConfig
from kvgraft.config.sources import Resolved, file_errors, resolve
from kvgraft.config.table import default_text, grouped_settings, settings_table, table_of
from kvgraft.config.vllm import VLLMConfig

__all__ = [
    "EngineConfig",
    "Resolved",
    "SGLangConfig",
    "ServerConfig",
    "VLLMConfig",
    "default_text",
    "file_errors",
    "grouped_settings",
    "quoted",
    "resolve",
    "rule_of",
    "settings_table",
    "table_of",
]
