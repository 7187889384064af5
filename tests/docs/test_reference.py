"""docs/reference/ and the tables of docs/sizes.md are what the code says; the README stays short."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.docs.code_index import ROOT

COMMAND = "python tools/reference/make.py"


def test_pages_are_what_the_code_says():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/reference/make.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run: {COMMAND}\n{done.stderr}"
    assert sorted((ROOT / "docs/reference").glob("*.md"))


def test_readme_is_a_page_that_people_read():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 140
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert max(len(re.findall(r"\d[\d.,]*", re.sub(r"[(`][^)`]*[)`]", "", cell))) for cell in cells) <= 4
