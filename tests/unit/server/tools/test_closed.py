"""Objects of tools' schemas that do not say whether they are open are closed, where that excludes nothing that they allow."""

from __future__ import annotations

import copy

import pytest
from tests.unit.engine.sampling.test_structure import Model
from transformers import AutoTokenizer

from kvgraft.engine.sampling.structure import StructureSpec
from kvgraft.models import bundled_model_path
from kvgraft.server.tools.closed import closed

CLOSED = {"additionalProperties": False}
TEXT = {"type": "string"}


def an_object(**properties):
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (an_object(a=TEXT), an_object(a=TEXT) | CLOSED),
        (an_object(a=an_object(b=TEXT)), an_object(a=an_object(b=TEXT) | CLOSED) | CLOSED),
        ({"type": "array", "items": an_object(a=TEXT)}, {"type": "array", "items": an_object(a=TEXT) | CLOSED}),
        (
            {"anyOf": [an_object(a=TEXT), {"type": "null"}]},
            {"anyOf": [an_object(a=TEXT) | CLOSED, {"type": "null"}]},
        ),
        (
            {"$defs": {"A": an_object(a=TEXT)}, "allOf": [{"$ref": "#/$defs/A"}]},
            {"$defs": {"A": an_object(a=TEXT) | CLOSED}, "allOf": [{"$ref": "#/$defs/A"}]},
        ),
    ],
)
def test_what_says_nothing_is_closed(schema, expected):
    given = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == given, "the request's own is left alone"


@pytest.mark.parametrize(
    "schema",
    [
        an_object(a=TEXT) | {"additionalProperties": True},
        an_object(a=TEXT) | {"additionalProperties": TEXT},
        an_object(a=TEXT) | {"patternProperties": {"^x": TEXT}},
        {"type": "object"},
        {"allOf": [an_object(a=TEXT), an_object(b=TEXT)]},
        an_object(a=TEXT) | {"anyOf": [an_object(b=TEXT), an_object(c=TEXT)]},
        {"required": ["b"], "anyOf": [an_object(a=TEXT)]},
        {"anyOf": [an_object(a=TEXT)], "oneOf": [an_object(b=TEXT)]},
        True,
        {"allOf": 5},
        an_object(a={"anyOf": True}) | {"additionalProperties": True},
    ],
)
def test_what_says_so_or_is_said_by_several_stays_open(schema):
    assert closed(schema) == schema


def test_a_definition_that_is_also_part_of_another_stays_open():
    definitions = {"$defs": {"A": an_object(a=TEXT)}}
    one, joined = {"$ref": "#/$defs/A"}, {"allOf": [{"$ref": "#/$defs/A"}, an_object(b=TEXT)]}
    assert closed(definitions | an_object(x=one))["$defs"]["A"]["additionalProperties"] is False
    assert closed(definitions | an_object(x=one, y=joined))["$defs"]["A"] == an_object(a=TEXT)


def test_recursion_ends():
    schema = {"$defs": {"N": an_object(next={"$ref": "#/$defs/N"})}, "$ref": "#/$defs/N"}
    assert closed(schema)["$defs"]["N"]["additionalProperties"] is False


def test_a_key_can_be_repeated_in_an_open_object_and_not_in_a_closed_one():
    model = Model(AutoTokenizer.from_pretrained(bundled_model_path()), [1])
    schema = an_object(city=TEXT) | {"required": ["city"]}
    again = '{"city": "Oslo", "description": "a", "description": "b"}'
    assert model.takes(StructureSpec.json_schema(schema), again) is True
    assert model.takes(StructureSpec.json_schema(closed(schema)), again) is None
    assert model.takes(StructureSpec.json_schema(closed(schema)), '{"city": "Oslo"}') is True
