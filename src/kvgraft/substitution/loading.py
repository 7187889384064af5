"""Build the provider that a setting names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, IntegrationError, one_line
from kvgraft.factories import imported
from kvgraft.substitution.provider import SemanticPrefixProvider

if TYPE_CHECKING:
    from collections.abc import Mapping


def provider_class(name: str) -> type[SemanticPrefixProvider]:
    """Import the provider called `module:Class`.

    Raises:
        ConfigError: It cannot be imported, or is no provider.
    """
    try:
        kind = imported("semantic_provider", name)
    except IntegrationError as error:
        raise ConfigError(str(error)) from error
    if not (isinstance(kind, type) and issubclass(kind, SemanticPrefixProvider)):
        raise ConfigError(f"semantic_provider {name!r} is no kvgraft.substitution.SemanticPrefixProvider")
    return kind


def load_provider(
    name: str, model_config: object, options: Mapping[str, object] | None = None
) -> SemanticPrefixProvider:
    """Build the provider called `module:Class` and initialise it.

    Args:
        name: As the setting has it; the module is imported.
        model_config: Handed to `on_init`: what the engine knows of its model.
        options: What its constructor is given, by keyword; None for nothing.

    Raises:
        ConfigError: It cannot be imported, built or initialised, or is no provider.
    """
    kind = provider_class(name)
    try:
        provider: SemanticPrefixProvider = kind(**(options or {}))
        provider.on_init(model_config)
    except Exception as error:
        raise ConfigError(f"semantic_provider {name!r} does not start: {one_line(error)}") from error
    return provider
