"""Count the lines of kvgraft that a process has loaded: what its operator must trust."""

from __future__ import annotations

import subprocess
import sys

_COUNT = """
import sys

def lines(path):
    with open(path, encoding="utf-8") as file:
        return sum(1 for _ in file)

paths = {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "kvgraft" and module.__file__}
print(sum(map(lines, paths)))
"""


def loaded_lines(program):
    """Lines of all modules of ours that a new process has loaded once it has run `program`."""
    done = subprocess.run([sys.executable, "-c", program + _COUNT], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])
