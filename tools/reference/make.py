"""Write docs/reference/ and the tables of docs/sizes.md from the code and its records; `--check` compares instead.

Run it after a change of a setting, a metric, a field, a command or a public name, and commit what it writes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from commands import commands_page
from metrics import metrics_page
from python_api import python_page
from settings import settings_page
from sizes import sizes_page

from kvgraft.server.field_table import field_tables

ROOT = Path(__file__).parents[2]
_HTTP = """\
# HTTP fields

Fields of the bodies that `kvgraft serve` takes ([server.md](../server.md)). Every field is read, refused with 400 unless it
asks for nothing, left out and named in the [report](../server.md#what-is-left-out), or on the short list of those that cannot
change the answer. An unknown name is refused with the name that
was probably meant (code `unknown_field`). `null` means absent.

"""


def pages() -> dict[Path, str]:
    """Return every written page by its path."""
    reference = ROOT / "docs" / "reference"
    sizes = ROOT / "docs" / "sizes.md"
    return {
        reference / "settings.md": settings_page(),
        reference / "metrics.md": metrics_page(),
        reference / "http.md": _HTTP + field_tables(),
        reference / "python.md": python_page(),
        reference / "commands.md": commands_page(),
        sizes: sizes_page(sizes.read_text(encoding="utf-8"), ROOT / "benchmarks" / "results"),
    }


def main() -> int:
    """Write the pages, or name those that are not as they would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    is_check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not is_check:
            path.write_text(pages()[path], encoding="utf-8")
        sys.stderr.write(f"{'stale' if is_check else 'written'}: {path.relative_to(ROOT)}\n")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
