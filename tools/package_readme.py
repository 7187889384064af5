"""Build hook: the README as a package index shows it, and the project's URLs.

An index does not have the files that the README links to. With `files-url` (`[tool.hatch.metadata.hooks.custom]` of
pyproject.toml) its relative links and pictures become absolute ones; without, their text stays and the links go.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}


class PackageReadme(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, object]) -> None:
        """Write both into the project's metadata."""
        files_url = str(self.config["files-url"]).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": packaged(text, files_url)}
        metadata["urls"] = {name: f"{files_url}/{page}" for name, page in _PAGES.items()} if files_url else {}


def packaged(text: str, files_url: str) -> str:
    """Return the README with links that lead somewhere from anywhere; blocks of code stay as they are.

    Args:
        text: The README in a checkout.
        files_url: Where its files can be read; empty for nowhere.
    """

    def link(match: re.Match[str]) -> str:
        mark, name, target = match.groups()
        if re.match(r"https?://|#", target):
            return match[0]
        if not files_url:
            return name
        return f"{mark}[{name}]({files_url}/{target}{'?raw=true' if mark else ''})"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
