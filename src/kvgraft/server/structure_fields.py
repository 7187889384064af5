"""Structure that the text of an answer must have: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.engine.sampling.structure import MAX_CHARS, StructureSpec
from kvgraft.errors import about
from kvgraft.http.fields import kind_of
from kvgraft.http.json_io import parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvgraft.http.fields import Fields

_FORMATS = ("text", "json_object", "json_schema")
_FORMAT_KEYS = frozenset({"type", "json_schema"})
_SCHEMA_KEYS = frozenset({"name", "schema", "strict", "description"})
_FLAT_KEYS = _SCHEMA_KEYS | {"type"}
_OUTPUT_KEYS = frozenset(
    {
        "json",
        "regex",
        "choice",
        "grammar",
        "json_object",
        "disable_any_whitespace",
        "disable_additional_properties",
        "whitespace_pattern",
        "structural_tag",
    }
)
_INSTEAD = {
    "disable_additional_properties": "set additionalProperties to false in the schema",
    "whitespace_pattern": "set disable_any_whitespace to leave none, or leave it out",
    "structural_tag": "use tools",
}
"""Fields of vLLM's `structured_outputs` that this server refuses, and what to do instead."""
_MAX_NAME_CHARS = 64


def structure_of(fields: Fields) -> StructureSpec | None:
    """Read `response_format` and `structured_outputs` of a body; None if they say nothing.

    Raises:
        BadRequestError: One of them is wrong, or both say something; the error names the field.
    """
    said, output = _response_format(fields), _structured_outputs(fields)
    if said is not None and output is not None:
        raise fields.error("structured_outputs", "says what response_format says, too; leave out one of them")
    return output if said is None else said


def structure_of_format(said: Fields) -> StructureSpec | None:
    """Read `text.format` of `/v1/responses`, where the schema stands beside its type; None if it may be any text.

    Raises:
        BadRequestError: It is wrong; the error names the field.
    """
    said.check_keys(_FLAT_KEYS)
    return _of_format(said, said)


def _response_format(fields: Fields) -> StructureSpec | None:
    if not fields.has("response_format"):
        return None
    said = fields.section("response_format", known=_FORMAT_KEYS)
    return _of_format(said, said.section("json_schema", known=_SCHEMA_KEYS))


def _of_format(said: Fields, schema: Fields) -> StructureSpec | None:
    """Return what a format of OpenAI's means; its schema stands in `schema`. All are kept, with `strict` or without."""
    if not said.has("type"):
        raise said.error("type", f"is missing; it is one of {', '.join(_FORMATS)}")
    match said.choice("type", "text", _FORMATS):
        case "json_object":
            return StructureSpec.json_object()
        case "json_schema":
            schema.text("name", max_chars=_MAX_NAME_CHARS)
            schema.text("description")
            schema.flag("strict")
            if not schema.has("schema"):
                raise schema.error("schema", "is missing; it is the JSON schema that the answer has to be of")
            with about(schema.name("schema")):
                return StructureSpec.json_schema(schema.section("schema").values)
    return None


def _structured_outputs(fields: Fields) -> StructureSpec | None:
    if not fields.has("structured_outputs"):
        return None
    said = fields.section("structured_outputs", known=_OUTPUT_KEYS)
    for key, instead in _INSTEAD.items():
        if said.values.get(key) not in (None, False):
            raise said.error(key, f"is not supported by this server; {instead}")
    kinds = [kind for kind in _READERS if said.values.get(kind) not in (None, False)]
    if len(kinds) != 1:
        raise fields.error(
            "structured_outputs", f"must have one of the keys {', '.join(_READERS)}, and has {len(kinds)}"
        )
    compact = said.flag("disable_any_whitespace")
    if compact and not kinds[0].startswith("json"):
        raise said.error("disable_any_whitespace", "is for json and json_object; leave it out")
    return replace(_READERS[kinds[0]](said), compact=compact)


def _json(said: Fields) -> StructureSpec:
    """`json` is a schema, or the text of one."""
    value = said.values["json"]
    if isinstance(value, str):
        try:
            value = parse_text(value)
        except ValueError as error:
            raise said.error("json", f"is not the text of a JSON schema: {error}") from error
    if not isinstance(value, dict):
        raise said.error("json", f"must be a JSON schema, not {kind_of(value)}")
    with about(said.name("json")):
        return StructureSpec.json_schema(value)


def _choice(said: Fields) -> StructureSpec:
    texts = said.texts("choice", max_items=MAX_CHARS, max_chars=MAX_CHARS)
    if not isinstance(said.values["choice"], list) or not texts:
        raise said.error("choice", "must be a list of one or more strings")
    return StructureSpec.choice(texts)


def _json_object(said: Fields) -> StructureSpec:
    said.flag("json_object")
    return StructureSpec.json_object()


_READERS: Mapping[str, Callable[[Fields], StructureSpec]] = {
    "json": _json,
    "regex": lambda said: StructureSpec.regex(said.text("regex", max_chars=MAX_CHARS)),
    "choice": _choice,
    "grammar": lambda said: StructureSpec.grammar(said.text("grammar", max_chars=MAX_CHARS)),
    "json_object": _json_object,
}
"""The kinds of `structured_outputs`, of which a request has one."""
