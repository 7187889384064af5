"""Calls of tools: what a request says of them, how models write them, and how they are found in what a model wrote."""

from __future__ import annotations

from kvgraft.server.tools.base import CallLayout, MalformedCallError, ReadCalls, ToolFormat, WrittenCall
from kvgraft.server.tools.calls import CallArguments, CallBegin, Content, OutputReader, Piece, ReadOutput, ToolCall
from kvgraft.server.tools.choice import Function, ToolUse, parse_tool_use
from kvgraft.server.tools.forced import ForcedReader
from kvgraft.server.tools.formats import TOOL_FORMATS, tool_format
from kvgraft.server.tools.free_text import FreeTextReader
from kvgraft.server.tools.reading import ToolReading

__all__ = [
    "TOOL_FORMATS",
    "CallArguments",
    "CallBegin",
    "CallLayout",
    "Content",
    "ForcedReader",
    "FreeTextReader",
    "Function",
    "MalformedCallError",
    "OutputReader",
    "Piece",
    "ReadCalls",
    "ReadOutput",
    "ToolCall",
    "ToolFormat",
    "ToolReading",
    "ToolUse",
    "WrittenCall",
    "parse_tool_use",
    "tool_format",
]
