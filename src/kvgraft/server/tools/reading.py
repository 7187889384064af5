"""Reader of the calls in the outputs of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.server.tools.calls import OutputReader, ReadOutput
from kvgraft.server.tools.forced import ForcedReader
from kvgraft.server.tools.free_text import FreeTextReader

if TYPE_CHECKING:
    from kvgraft.server.tools.base import ToolFormat
    from kvgraft.server.tools.choice import ToolUse


@dataclass(frozen=True, slots=True)
class ToolReading:
    """Finds calls in the outputs of one request.

    Attributes:
        use: What the request says about tools.
        tool_format: How the model writes calls.
        is_structured: A structure makes calls be in the layout of the format.
        may_begin_freely: Any text may stand before calls.
    """

    use: ToolUse
    tool_format: ToolFormat
    is_structured: bool
    may_begin_freely: bool

    def reader(self) -> OutputReader:
        """Return a reader of one output."""
        if not self.may_begin_freely:
            return ForcedReader(self.tool_format.layout, self.use.names)
        return FreeTextReader(
            self.tool_format,
            self.use.names,
            is_parallel=self.use.is_parallel,
            is_laid_out=self.is_structured,
            withheld=self.use.withheld,
        )

    def whole(self, text: str) -> ReadOutput:
        """Read a whole output."""
        reader, read = self.reader(), ReadOutput()
        read.add(reader.feed(text))
        read.add(reader.finish())
        return read
