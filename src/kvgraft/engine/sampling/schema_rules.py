"""Keywords of a JSON schema that llguidance would take and not keep, or take too long for: refused with their place.

Of keywords that it does not know at all it says so itself; those of another draft than the schema's it passes over.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_UNKEPT = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Keywords that would be ignored under some draft."""
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES = ("additionalItems", "additionalProperties", "items")
_NUMBERS = ("const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_EXACT = 2**53
"""Larger numbers are rounded to float64 by the backend, and others than these would come out."""
_MOST_TOGETHER = 12
"""Patterns and formats that hold of one value together: the backend takes five times as long for every two more, 0.02 seconds
for 14 of them, 2 for 20, and did not come to an end with 30, which cannot be stopped."""
_MOST_STATES = 5_000
"""Sum of all `multipleOf`, as whole numbers: an automaton has a state per remainder, and compiles in a second or less."""


def check_schema(schema: object) -> None:
    """Refuse a schema with values that could be others than it says.

    Raises:
        ConfigError: It has such a keyword; the message names it and where it is.
    """
    num_states, counted = 0, dict[int, int]()
    for place, inner in _schemas(schema, "the schema"):
        if _num_together(inner, schema, counted) > _MOST_TOGETHER:
            raise ConfigError(
                f"{place} has more than {_MOST_TOGETHER} patterns and formats that hold together; join them into fewer"
            )
        for keyword in inner:
            if keyword in _UNKEPT and inner[keyword] is not False:
                raise ConfigError(f"{place} has {keyword}, which structured output cannot keep; leave it out")
        if "x-guidance" in inner or ("$id" in inner and inner is not schema):
            raise ConfigError(f"{place} has x-guidance or a $id of its own, which structured output does not know")
        if "prefixItems" in inner and "2020-12" not in str(_root(schema).get("$schema", "2020-12")):
            raise ConfigError(f"{place} has prefixItems, which the draft that $schema names does not know")
        _check_numbers(place, inner)
        _check_properties(place, inner)
        num_states += _states(inner.get("multipleOf"))
    if num_states > _MOST_STATES:
        raise ConfigError(f"multipleOf values of a schema sum up to {_MOST_STATES} at most, as whole numbers")


def _root(schema: object) -> Mapping[str, object]:
    return schema if isinstance(schema, dict) else {}


def _schemas(schema: object, place: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """A schema and all within it, with where they are. What is no schema is left to the backend, which refuses it."""
    waiting = [(place, schema)]
    while waiting:
        where, inner = waiting.pop()
        if not isinstance(inner, dict):
            continue
        yield where, inner
        for keyword in _MAPS:
            if isinstance(inner.get(keyword), dict):
                waiting += [(f"{where}.{keyword}.{name}"[:120], value) for name, value in inner[keyword].items()]
        for keyword in (*_LISTS, *_ONES):
            value = inner.get(keyword)
            values = value if isinstance(value, list) else [value]
            waiting += [(f"{where}.{keyword}"[:120], one) for one in values]


def _num_together(schema: object, root: object, counted: dict[int, int]) -> int:
    """Count the patterns and formats that a value of a schema may have to fit together.

    Args:
        schema: In `root`.
        root: What references are looked up in.
        counted: The counts of schemas that were looked at, by their ids; new ones are added.

    Complexity: O(size) for all schemas of a root, however long its chains of references are.
    """
    waiting: list[tuple[object, list[list[object]] | None]] = [(schema, None)]  # with its groups once these are counted
    while waiting:
        inner, groups = waiting.pop()
        if not isinstance(inner, dict) or (groups is None and id(inner) in counted):
            continue
        if groups is not None:
            own = ("pattern" in inner) + ("format" in inner)
            counted[id(inner)] = own + sum(max((counted.get(id(one), 0) for one in each), default=0) for each in groups)
            continue
        counted[id(inner)] = 0  # a schema within itself adds nothing
        groups = _groups(inner, root)
        waiting.append((inner, groups))
        waiting += [(one, None) for each in groups for one in each]
    return counted.get(id(schema), 0)


def _groups(schema: Mapping[str, Any], root: object) -> list[list[object]]:
    """Return the schemas about the value of a schema: one of every group holds together with those of the others."""
    choices = [schema[keyword] for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)]
    joined = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    return [*choices, *([one] for one in joined), [referred(schema.get("$ref"), root)]]


def referred(pointer: object, root: object) -> object:
    """Return what `#/...` names in `root`; None for everything else."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found = root
    for part in filter(None, pointer[1:].split("/")):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _check_numbers(place: str, schema: Mapping[str, object]) -> None:
    waiting = [schema.get(keyword) for keyword in _NUMBERS]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int | float) and abs(value) > _EXACT:
            raise ConfigError(f"{place} has the number {str(value)[:30]}; beyond 2**53 they are rounded, use a text")
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def _check_properties(place: str, schema: Mapping[str, object]) -> None:
    """Keys beyond `properties` may come twice, so more than one of them cannot be counted on."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_required + 1:
        raise ConfigError(f"{place} has minProperties {least}; name {least - 1} of them in properties and required")


def _states(multiple: object) -> int:
    """The whole number that `multipleOf` is without its decimal point."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 0
    try:
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
    except InvalidOperation:
        return 0
    return int("".join(map(str, digits)))
