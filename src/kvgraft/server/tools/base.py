"""A way of writing tool calls: where calls begin in a text, how one is read, and how a forced one is laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.http.messages import Message


class WrittenCall(NamedTuple):
    """A call as the model wrote it.

    Attributes:
        name: Of the function.
        arguments: JSON text of an object.
    """

    name: str
    arguments: str


class ReadCalls(NamedTuple):
    """Calls that stand at the beginning of a text.

    Attributes:
        length: Characters that they take up.
        calls: In the order of the text.
    """

    length: int
    calls: tuple[WrittenCall, ...]


class MalformedCallError(Exception):
    """Text that began like a call is none; it stays text."""


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Layout of forced calls: `opening`, calls with `separator` between them, `closing`.

    Attributes:
        opening: Before the first call.
        separator: Between two calls.
        closing: After the last call.
        before: Before the arguments of a call; `{name}` stands for the name of the function.
        after: After the arguments.
        mark: What nothing but calls begins with, if there is such a mark.
    """

    before: str
    after: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    mark: str = ""

    @property
    def beginning(self) -> str:
        """Return what free text before forced calls must not contain."""
        return self.mark or self.before.partition("{name}")[0]

    def begins(self, text: str, names: Collection[str]) -> bool:
        """Return whether a text begins as forced calls of one of some functions do."""
        heads = (self.before_arguments(name) for name in names)
        return any(text.startswith((head, self.opening + head)) for head in heads)

    def before_arguments(self, name: str) -> str:
        """Return what stands before the arguments of a call of `name`."""
        return self.before.replace("{name}", name)


class ToolFormat(ABC):
    """A way of writing tool calls. Immutable; shared by requests.

    Attributes:
        markers: Texts that a call may begin with. Where one of them is a special token, the model's special tokens are shown
            in the text that is read.
        layout: How a forced call is written; `read` reads it.
        between: A text that may stand between two calls and goes with them.
    """

    markers: tuple[str, ...]
    layout: CallLayout
    between: str = ""

    @abstractmethod
    def read(self, text: str, names: Collection[str], *, is_whole: bool) -> ReadCalls | None:
        """Read the call or calls at the beginning of a text that begins with a marker.

        What is read of a text is read of all texts that begin with it, so answers do not depend on how a stream was cut.

        Args:
            text: The output from a marker on.
            names: Functions of the request.
            is_whole: No more text follows.

        Returns:
            What was read; None if more text is needed.

        Raises:
            MalformedCallError: It is no call, with any text after it.
        """

    def template_message(self, message: Message) -> Message:
        """Return a message in the form that templates of such models take."""
        return message
