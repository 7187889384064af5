"""The idea stays one small file, and the walk through one graft a walk."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_twin_is_small_and_has_nothing_of_ours():
    text = (ROOT / "examples" / "graft_in_500_lines.py").read_text()
    assert len(text.splitlines()) <= 500
    assert not re.search(r"^\s*(from|import) kvgraft", text, re.MULTILINE)


def test_a_graft_is_followed_through_ten_files():
    page = (ROOT / "docs" / "follow-a-graft.md").read_text()
    files = re.findall(r"^\d+\. \*\*\[[\w/.]+\]\(\.\./(src/[\w/.]+)\)", page, re.MULTILINE)
    assert 5 < len(files) <= 10
    assert all((ROOT / name).is_file() for name in files)
