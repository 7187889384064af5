"""`kvgraft` as a process, and what is asked of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

PATIENCE_S = 60
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"


class Process:
    """`kvgraft` with a page; a context manager."""

    def __init__(self, *arguments):
        self._arguments = arguments

    def __enter__(self):
        command = [str(PYTHON), "-m", "kvgraft", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = self._process.stdout.readline()
        self.url = re.search(r" at (http://[\w.:]+)", line)[1]  # `kvgraft ui` names the metrics that it shows, too
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()

    def kill(self):
        """End it at once, with what it was writing left as it is."""
        self._process.kill()

    def complete(self, prompt, **fields):
        body = json.dumps({"prompt": prompt, "max_tokens": 2} | fields).encode()
        asked = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())


def serve(port=0, *more):
    return Process("serve", "--num-slots", "4000", "--port", str(port), *more)


def document(first):
    return [3 + (first + 7 * number) % 1500 for number in range(300)]
