"""Build the provider that a setting names."""

from __future__ import annotations

import importlib

from kvgraft.errors import ConfigError, one_line
from kvgraft.prefix.semantic.provider import SemanticPrefixProvider


def load_provider(name: str, model_config: object) -> SemanticPrefixProvider:
    """Build the provider called `module:Class` without arguments and initialise it.

    Args:
        name: As the setting has it; the module is imported.
        model_config: Handed to `on_init`: what the engine knows of its model.

    Raises:
        ConfigError: It cannot be imported, built or initialised, or is no provider.
    """
    module_name, _, class_name = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(f"semantic_provider {name!r} cannot be loaded: {one_line(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, SemanticPrefixProvider)):
        raise ConfigError(f"semantic_provider {name!r} is no kvgraft.prefix.SemanticPrefixProvider")
    try:
        provider: SemanticPrefixProvider = kind()
        provider.on_init(model_config)
    except Exception as error:
        raise ConfigError(f"semantic_provider {name!r} does not start: {one_line(error)}") from error
    return provider
