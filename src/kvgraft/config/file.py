"""Read settings from a YAML or JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.config.setting import quoted
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST_FILE = 1 << 20
_DEEPEST = 8
"""Collections within one another; settings have two."""
_FORM = "settings such as 'port: 8000'"


def read_settings(name: str) -> dict[str, object]:
    """Return the values of a file; one that ends in `.json` is JSON, every other is YAML. An empty file has none.

    Raises:
        ConfigError: The file cannot be read, or is not one flat mapping.
        ImportError: A YAML file is given and PyYAML is not installed.
    """
    text = _read(name)
    values = _from_json(name, text) if name.lower().endswith(".json") else _from_yaml(name, text)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must hold {_FORM}, not {quoted(values)}")
    strange = [key for key in values if not isinstance(key, str)]
    if strange:
        raise ConfigError(f"{name}: unknown setting {quoted(strange[0])}; names of settings are words")
    return values


def _read(name: str) -> str:
    """Return the text of a file, of which no more than the largest size is read."""
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        text = data.decode() if len(data) <= _LARGEST_FILE else ""
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        else:
            reason = "no file can have this name"
        raise ConfigError(
            f"cannot read settings from {quoted(name)}: {reason}; check --config or KVGRAFT_CONFIG"
        ) from error
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{name} is larger than 1 MiB; give a file of {_FORM}")
    return text


def _from_json(name: str, text: str) -> object:
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error


def _from_yaml(name: str, text: str) -> object:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ImportError(
            "reading YAML settings needs yaml: pip install 'kvgraft[server]', or write them as JSON", name="yaml"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that is given twice, where PyYAML silently takes the last, and what settings never are.

        PyYAML takes time quadratic in the depth of nested collections; aliases grow exponentially when they are shown.
        """

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401
            if self.check_event(yaml.AliasEvent):
                raise ValueError("an alias stands for a value; write it out")
            self.depth += 1
            if self.depth > _DEEPEST:
                raise ValueError(f"it is nested more than {_DEEPEST} deep; write {_FORM}")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ANN401
            pairs = [(self.construct_object(key, deep=True), value) for key, value in node.value]
            _distinct(pairs)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{name}{place} is not valid YAML: {reason}") from error


def _distinct(pairs: Sequence[tuple[object, object]]) -> dict[object, object]:
    values: dict[object, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{quoted(key)} is given twice; keep one")
        values[key] = value
    return values
