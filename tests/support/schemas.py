"""Twenty JSON schemas of the kinds that people send, each keyword that is supported among them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
_WHOLE: Schema = {"type": "integer"}


def _object(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _nested(depth: int) -> Schema:
    schema = _object(value=_WHOLE)
    for _ in range(depth):
        schema = _object(inner=schema)
    return schema


SCHEMAS: dict[str, Schema] = {
    "person": _object(name={"type": "string", "maxLength": 20}, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional": _object([], a=_WHOLE, b={"type": "boolean"}, c={"type": "null"}),
    "enum": _object(colour={"enum": ["red", "green", "blue", None, 3]}),
    "large enum": {"enum": [f"city {number * 7919 % 1_000} of {number}" for number in range(500)]},
    "const": _object(kind={"const": "invoice"}, version={"const": 2}, meta={"const": {"a": [1, "b"]}}),
    "array": {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [_WHOLE, {"type": "boolean"}], "items": False, "minItems": 2},
    "numbers": _object(
        price={"type": "number", "exclusiveMinimum": 0, "maximum": 99.5},
        count={"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 20},
    ),
    "pattern": _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "counted pattern": _object(key={"type": "string", "pattern": "^([a-f0-9]{4}:){3}[a-f0-9]{4}$"}),
    "lengths": _object(text={"type": "string", "minLength": 3, "maxLength": 8}),
    "long text": _object(text={"type": "string", "minLength": 60, "maxLength": 120}),
    "formats": _object(
        day={"type": "string", "format": "date"},
        at={"type": "string", "format": "time"},
        id={"type": "string", "format": "uuid"},
    ),
    "any of": {"anyOf": [_object(a=_WHOLE), _object(b={"type": "boolean"}), {"type": "null"}]},
    "one of": {"oneOf": [_object(kind={"const": "a"}, x=_WHOLE), _object(kind={"const": "b"}, y={"type": "boolean"})]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": _WHOLE}, "required": ["a"]},
            {
                "type": "object",
                "properties": {"b": {"type": "boolean"}},
                "required": ["b"],
                "additionalProperties": _WHOLE,
            },
        ]
    },
    "references": {
        "$defs": {"node": _object(["value"], value=_WHOLE, next={"$ref": "#/$defs/node"})},
        "$ref": "#/$defs/node",
    },
    "nested": _nested(12),
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{2}$": _WHOLE},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "types": _object(value={"type": ["integer", "string", "null"], "maxLength": 5, "minimum": 3}),
}
