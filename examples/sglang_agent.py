"""Let an agent read files step by step, on an SGLang server that has kvgraft in it.

Start the server (docs/integrations/sglang.md says how kvgraft gets into its environment):

    python -m sglang.launch_server --model-path HuggingFaceTB/SmolLM2-135M-Instruct --radix-cache-backend kvgraft

Then give it a task; this program needs nothing but Python:

    python examples/sglang_agent.py --folder src/kvgraft/donors "Find out how donors are found."

Every prompt begins with the time and the number of the step, as many agents' do, so a prefix cache ends in the first line.
kvgraft reuses text behind it; each step says how much.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from datetime import datetime
from pathlib import Path

FILE_CHARACTERS = 2_000


def main() -> None:
    """Read as many files as there are steps, then answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--folder", type=Path, default=Path("src/kvgraft/donors"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    args = parser.parse_args()
    unread = sorted(args.folder.rglob("*.py"))
    seen = [f"You are an agent. Your task: {args.task}\nFiles: {', '.join(file.name for file in unread)}"]
    for step in range(1, args.steps + 1):
        answer = ask(args.url, step, seen, "Next, read the file")
        file = next((file for file in unread if file.name in answer), unread[0])
        unread.remove(file)
        seen.append(f"# {file.name}\n{file.read_text(encoding='utf-8')[:FILE_CHARACTERS]}")
        print(f"  reads {file.name}")
    print(" ", " ".join(ask(args.url, args.steps + 1, seen, "The answer:", max_new_tokens=48).split()))


def ask(url: str, step: int, seen: list[str], begin: str, max_new_tokens: int = 8) -> str:
    """Ask for what follows `begin`, and print what was reused of the prompt."""
    clock = f"It is {datetime.now():%H:%M:%S}, step {step}."
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0}
    body = {"text": "\n\n".join([clock, *seen, begin]), "sampling_params": sampling}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    facts = answer["meta_info"]
    print(f"step {step}: {facts['prompt_tokens']} prompt tokens, {facts['cached_tokens']} reused")
    return answer["text"]


if __name__ == "__main__":
    main()
