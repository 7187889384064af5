"""The base of all groups of settings: names, rules, building from plain values, copies with changes."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any, Self

from kvgraft.config.setting import parsed, rule_of
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.config.setting import Rule


class Settings:
    """Base of frozen dataclasses with fields made by `setting`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check every value; one that came from a caller's code is held to the same rules as one from a file."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, parsed(field, getattr(self, field.name)))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Build from plain values; an unknown key or a value of the wrong type raises `ConfigError`."""
        return cls().updated(values)

    @classmethod
    def field(cls, name: str) -> dataclasses.Field[Any]:
        """Return the field called `name`; raises `ConfigError` that names the closest one."""
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if name in fields:
            return fields[name]
        closest = difflib.get_close_matches(str(name), fields, n=1)
        hint = f"did you mean {closest[0]!r}?" if closest else f"known are {', '.join(sorted(fields))}"
        raise ConfigError(f"unknown setting {name!r}; {hint}")

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """The rule of every setting, in order."""
        return {field.name: rule_of(field) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    def updated(self, values: Mapping[str, object]) -> Self:
        """Return a copy with `values` set; texts are parsed into the type of the field."""
        changes: dict[str, Any] = {name: parsed(self.field(name), value) for name, value in values.items()}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]
