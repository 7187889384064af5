"""Hooks of mkdocs: pages at the root of the repository join the site, and links that leave it become text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {name: name.lower() for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
"""By their path in the repository: where they stand in the site."""
SITE_PATHS = {**ROOT_PAGES, "README.md": "index.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root."""
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links of the repository into links of the site."""
    parts = _CODE.split(markdown)
    return "".join(part if i % 2 else with_site_links(part, page.file.src_uri) for i, part in enumerate(parts))


def with_site_links(text: str, uri: str) -> str:
    """Return text of the page at `uri` with links to pages of the site, and none to other files of the repository."""
    source = next((name for name, place in ROOT_PAGES.items() if place == uri), f"docs/{uri}")

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_mark, anchor = target.partition("#")
        if not path or re.match(r"\w+:", target):
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = SITE_PATHS.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if place is None:
            return label
        relative = posixpath.relpath(place, posixpath.dirname(uri) or ".")
        return f"{mark}[{label}]({relative}{hash_mark}{anchor})"

    return _LINK.sub(link, text)
