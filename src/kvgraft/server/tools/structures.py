"""Structures of outputs that hold calls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.engine.sampling.structure import StructureKind, StructureSpec
from kvgraft.errors import about
from kvgraft.http.errors import BadRequestError
from kvgraft.server.tools.closed import closed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.server.tools.base import CallLayout
    from kvgraft.server.tools.choice import Function, ToolUse

Part = dict[str, object]


def structure_of(use: ToolUse, layout: CallLayout, answer: StructureSpec | None) -> StructureSpec | None:
    """Return what the output of a request with tools has to be; None if it may be anything.

    Strict tools hold the model to their schemas once it has begun to write a call; before it there may be any text.

    Args:
        use: What the request says about tools.
        layout: How forced calls are written.
        answer: What an answer without calls has to be, or None.

    Raises:
        BadRequestError: The model may call or answer, and the answer's structure cannot stand beside calls.
    """
    if not use.functions or not (use.is_forced or use.is_strict or answer):
        return answer
    calls = _calls(use.functions, layout, is_parallel=use.is_parallel)
    with about("tools"):
        forced = StructureSpec.parts(calls)
    if use.is_forced:
        return forced
    if answer is None:
        return StructureSpec.parts([{"free": {"until": [layout.beginning]}}, {"optional": calls}])
    return replace(StructureSpec.parts([{"any_of": [calls, [{"schema": _schema(answer)}]]}]), compact=answer.compact)


def _schema(answer: StructureSpec) -> object:
    if answer.kind is StructureKind.JSON_OBJECT:
        return {"type": "object"}
    if answer.kind is StructureKind.JSON_SCHEMA:
        return json.loads(answer.source)
    raise BadRequestError(
        f"an output of the structure {answer.kind} cannot be calls of tools as well; leave tools out, or set "
        "tool_choice to 'none' or 'required'",
        param="tools",
    )


def _calls(functions: Sequence[Function], layout: CallLayout, *, is_parallel: bool) -> list[Part]:
    bodies = [_call(function, layout) for function in functions]
    call: list[Part] = bodies[0] if len(bodies) == 1 else [{"any_of": bodies}]
    if is_parallel:
        separator = {"separator": layout.separator} if layout.separator else {}
        call = [{"repeat": call, **separator}]
    return [*_text(layout.opening), *call, *_text(layout.closing)]


def _call(function: Function, layout: CallLayout) -> list[Part]:
    before = layout.before_arguments(function.name)
    return [*_text(before), {"schema": closed(function.schema)}, *_text(layout.after)]


def _text(text: str) -> list[Part]:
    return [{"text": text}] if text else []
