"""`examples/langchain_rag.py`: LangChain of this environment beside the engine of `.venv`, as one environment has both."""

from __future__ import annotations

import re
import subprocess
import sysconfig

import pytest
from tests.clients.served import ELSEWHERE, IN_CLIENTS_ENVIRONMENT, ROOT, SERVERS_PYTHON, servers_environment

if not IN_CLIENTS_ENVIRONMENT:
    pytest.skip(ELSEWHERE, allow_module_level=True)

# Behind the engine's own packages, which stay those of its environment.
RUN = """
import runpy, sys
sys.argv.pop(0)
sys.path.append(sys.argv.pop(0))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_chain_reuses_passages_in_any_order():
    program = [str(ROOT / "examples" / "langchain_rag.py"), "Which function merges?", "Which function removes indents?"]
    command = [str(SERVERS_PYTHON), "-c", RUN, sysconfig.get_path("purelib"), *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=servers_environment())
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"(\d+) prompt tokens, (\d+) exact, (\d+) shifted", done.stdout)
    assert first[1:] == ("0", "0")
    assert int(second[1]) + int(second[2]) > 200  # of seven functions, two questions share three
