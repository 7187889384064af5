"""Close the objects of a tool's schema that do not say whether they are open.

JSON lets an object repeat a key, and a grammar cannot see that a key was there already: a model that is held to an open
object may write one property again and again. What OpenAI asks of strict schemas, `additionalProperties: false`, is
therefore what a tool that says nothing of it means here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from kvgraft.engine.sampling.schema_rules import referred

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords with schemas about the same value as the schema that has them."""
_OF_KEYS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")


def closed(schema: object) -> object:
    """Return a copy of a schema in which objects with `properties` take no others, unless they say so.

    An object stays open where several schemas say together what it has, as in `allOf`: closed ones would exclude one another.
    """
    made: Any = copy.deepcopy(schema)
    seen: set[tuple[int, bool]] = set()
    lone: dict[int, dict[str, Any]] = {}
    joined: set[int] = set()
    waiting: list[tuple[object, bool]] = [(made, True)]
    while waiting:
        node, is_alone = waiting.pop()
        if not isinstance(node, dict) or (id(node), is_alone) in seen:
            continue
        seen.add((id(node), is_alone))
        if is_alone:
            lone[id(node)] = node
        else:
            joined.add(id(node))
        waiting += _within(node, made, is_alone=is_alone)
    for key, node in lone.items():
        if key not in joined and node.get("properties") and not _is_joined(node) and not _says(node):
            node["additionalProperties"] = False
    return made


def _says(node: dict[str, Any]) -> bool:
    return "additionalProperties" in node or "patternProperties" in node


def _is_joined(node: dict[str, Any]) -> bool:
    return "$ref" in node or any(keyword in node for keyword in _IN_PLACE)


def _within(node: dict[str, Any], root: object, *, is_alone: bool) -> Iterator[tuple[object, bool]]:
    """Yield the schemas in a schema, and whether each alone says what its value is."""
    for keyword in ("properties", "patternProperties"):
        for value in _values(node.get(keyword)):
            yield value, True
    for keyword in ("items", "additionalProperties", "prefixItems", "additionalItems"):
        value = node.get(keyword)
        for one in value if isinstance(value, list) else [value]:
            yield one, True
    given = [(keyword, listed) for keyword in _IN_PLACE if isinstance(listed := node.get(keyword), list)]
    branches = [(keyword, one) for keyword, listed in given for one in listed if isinstance(one, dict)]
    target = referred(node.get("$ref"), root)
    speakers = len([one for keyword, one in branches if keyword == "allOf"]) + (target is not None)
    speakers += sum(keyword in node for keyword in ("anyOf", "oneOf"))
    is_one = is_alone and speakers == 1 and not any(keyword in node for keyword in _OF_KEYS)
    for _, one in branches:
        yield one, is_one
    if target is not None:
        yield target, is_one


def _values(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else []
