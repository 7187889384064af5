"""What stands in the fenced blocks of a page: programs, commands, what commands print, data, pictures."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from tests.docs.code_index import ROOT

PROGRAMS = {
    "apt",
    "apt-get",
    "cp",
    "curl",
    "docker",
    "export",
    "git",
    "kubectl",
    "kvgraft",
    "make",
    "make_venv.sh",
    "mooncake_master",
    "pip",
    "promtool",
    "python",
    "python3",
    "redis-server",
    "sudo",
    "systemctl",
    "vllm",
}
"""A block without a language that begins with one of them is commands."""


@dataclass(frozen=True)
class Snippet:
    """A fenced block.

    Attributes:
        page: Where it stands.
        line: Number of its first line there.
        language: As the fence says; empty if it says nothing.
        text: What it holds.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def is_transcript(self) -> bool:
        """Whether it shows commands behind `$ ` and what they print."""
        return self.text.startswith("$ ")

    @property
    def is_shell(self) -> bool:
        """Whether it is commands to be typed."""
        words = re.sub(r"^(\w+=('[^']*'|\"[^\"]*\"|\S*)\s+)*", "", self.text).split()
        program = words[0].rsplit("/", 1)[-1] if words else ""
        if re.match(r"kvgraft (VERSION|\d)", self.text):  # what `serve` says when it is ready
            return False
        named = self.language in {"sh", "bash", "console"}
        return not self.is_transcript and (named or (not self.language and program in PROGRAMS))

    @property
    def commands(self) -> list[str]:
        """Commands of a shell block, each in one line without its comment; lines are joined where a quote is open."""
        found, waiting = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            waiting = f"{waiting}\n{line}" if waiting else line
            try:
                words = shlex.split(waiting, comments=True)
            except ValueError:
                continue
            found += [shlex.join(words)] * bool(words)
            waiting = ""
        assert not waiting, f"{self.place}: a quote is not closed"
        return found

    @property
    def transcript(self) -> list[tuple[str, list[str]]]:
        """Commands and the lines that each prints."""
        steps: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
        return steps


@cache
def snippets(page: str) -> tuple[Snippet, ...]:
    """The fenced blocks of a page in order."""
    text = (ROOT / page).read_text()
    starts = list(accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0))
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return tuple(Snippet(page, starts.index(m.start(2)) + 1, m[1].strip(), m[2]) for m in found)
