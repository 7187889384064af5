"""The walk through one graft stays a walk: few files, few lines."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_graft_is_followed_through_ten_files_and_1500_lines():
    page = (ROOT / "docs" / "follow-a-graft.md").read_text()
    files = re.findall(r"^\d+\. \*\*\[[\w/.]+\]\(\.\./(src/[\w/.]+)\)", page, re.MULTILINE)
    assert 5 < len(files) <= 10
    assert sum(len((ROOT / name).read_text().splitlines()) for name in files) <= 1_500
