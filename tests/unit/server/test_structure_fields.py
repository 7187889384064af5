"""`response_format` and `structured_outputs`: what they become, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from kvgraft.engine.sampling.structure import StructureSpec
from kvgraft.http.errors import BadRequestError
from kvgraft.http.fields import Fields
from kvgraft.server.structure_fields import structure_of, structure_of_format

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True, "description": "x"}}


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructureSpec.json_object()),
        ({"response_format": FORMAT}, StructureSpec.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, StructureSpec.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructureSpec.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructureSpec.json_schema(SCHEMA)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            StructureSpec.json_schema(SCHEMA, compact=True),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructureSpec.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructureSpec.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructureSpec.grammar('start: "a"')),
        ({"structured_outputs": {"json_object": True}}, StructureSpec.json_object()),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, StructureSpec.regex("a")),
    ],
)
def test_what_they_become(body, spec):
    assert structure_of(Fields(body)) == spec


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jason": SCHEMA}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_named(body, param):
    with pytest.raises(BadRequestError) as caught:
        structure_of(Fields(body))
    assert caught.value.param == param


def test_the_format_of_responses_has_its_schema_beside_its_type():
    said = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    assert structure_of_format(Fields(said, "text.format")) == StructureSpec.json_schema(SCHEMA)
    assert structure_of_format(Fields({"type": "text"}, "text.format")) is None
    with pytest.raises(BadRequestError, match=r"text\.format\.schema is missing"):
        structure_of_format(Fields({"type": "json_schema", "name": "thing"}, "text.format"))


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_endpoints_hand_it_to_the_engine(server, endpoint):
    assert getattr(server, endpoint)(response_format=FORMAT).status == 200
    assert server.engine.calls[-1].sampling.structure == StructureSpec.json_schema(SCHEMA)


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_older_names_are_refused_with_the_newer_one(server, name):
    assert "structured_outputs" in server.complete(**{name: "a"}).error["message"]
