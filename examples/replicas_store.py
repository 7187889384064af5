"""Run two servers with one store: what the first one has read, the second one reuses, and so does either after a restart.

    pip install '.[torch,server,store]'
    python examples/replicas_store.py

Each is a `kvgraft serve --store file:DIR`, which can be typed just as well, on two machines that share a volume. The store
may also be a Redis or a Mooncake Store (docs/storage.md).
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tempfile
import textwrap
import time
import urllib.request

from kvgraft.bench.server_process import ServerProcess

DOCUMENT = inspect.getsource(textwrap)[:6_000]
PATIENCE_S = 120


def main() -> None:
    """Let the first read a document, and ask the second about it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", args.model, "--served-model-name", "model", "--store", f"file:{folder}"]
        with ServerProcess(flags) as first, ServerProcess(flags) as second:
            show("first replica", ask(first.url, f"Read this module.\n\n{DOCUMENT}\n\nWhat does wrap do?"))
            wait_until_known(second.url)
            show(
                "second replica", ask(second.url, f"Below is a module of Python's.\n\n{DOCUMENT}\n\nWhat does fill do?")
            )


def ask(url: str, prompt: str) -> dict[str, object]:
    """Return the report of a request."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["kvgraft"]


def show(name: str, report: dict[str, object]) -> None:
    """Print what was reused and from where, or why nothing was."""
    tiers = ", ".join(sorted({span["tier"] for span in report["spans"]}))
    origin = f"out of: {tiers}" if tiers else f"because: {report['miss']['reason']}"
    print(f"{name}: {report['num_tokens']} prompt tokens, {report['reused_tokens']} reused, {origin}")


def wait_until_known(url: str) -> None:
    """Return when a server has found a donor in the store, which is written and read behind the requests."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/metrics") as response:
            if re.search(r"^kvgraft:store_cold_donors\S* [1-9]", response.read().decode(), re.MULTILINE):
                return
        time.sleep(0.1)
    raise TimeoutError("nothing was found in the store; the first server's log says why")


if __name__ == "__main__":
    main()
