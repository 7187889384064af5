"""The pages and what they name: spans of code, fenced blocks, commands, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product

from tests.docs.code_index import ROOT

PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)


@dataclass(frozen=True)
class Block:
    """A fenced block and its language, which may be empty."""

    language: str
    text: str


@dataclass(frozen=True)
class Page:
    """A page, its fenced blocks and its spans of code."""

    name: str
    prose: str
    blocks: tuple[Block, ...]

    @property
    def spans(self) -> list[str]:
        """What stands in backticks outside of blocks."""
        return [match[2].strip() for match in re.finditer(r"(`+)(.+?)\1(?!`)", self.prose, re.DOTALL)]

    @property
    def links(self) -> list[str]:
        """Targets of links, without those that leave the repository."""
        found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", self.prose))
        return [target for target in found if not target.startswith(("http://", "https://", "mailto:"))]

    @property
    def anchors(self) -> set[str]:
        """What `#...` may name, as GitHub makes it of headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @property
    def commands(self) -> list[str]:
        """Commands in blocks and spans: lines that begin with a program, continued lines joined, comments cut off."""
        lines = []
        for block in self.blocks:
            if block.language in ("", "sh", "bash", "console"):
                lines += block.text.replace("\\\n", " ").splitlines()
        lines += [" ".join(span.split()) for span in self.spans]
        cut = [re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ") for line in lines]
        is_log_line = re.compile(r"kvgraft (is|serves|VERSION|\d)")
        is_command = re.compile(r"(\w+=\S+ )*(kvgraft|make|python|\S*/python|\S*/kvgraft) ")
        return [line for line in cut if is_command.match(line) and not is_log_line.match(line)]


@cache
def page(name: str) -> Page:
    """Read a page."""
    text = (ROOT / name).read_text()
    blocks = tuple(
        Block(m[1].strip(), m[2]) for m in re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
    return Page(name, re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), blocks)


def expanded(path: str) -> list[str]:
    """`a/{b,c}.py` as its paths."""
    parts = [part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", path)]
    return ["".join(chosen) for chosen in product(*parts)]
