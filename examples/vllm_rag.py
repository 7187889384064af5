"""Answer questions over a folder of Markdown with a vLLM server that has kvgraft in it.

Start the server (docs/integrations/vllm.md says how kvgraft gets into its environment):

    vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --kv-transfer-config '{"kv_connector": "GraftConnector",
      "kv_connector_module_path": "kvgraft.integrations.vllm", "kv_role": "kv_both"}'

Then ask; this program needs nothing but Python:

    python examples/vllm_rag.py --folder docs "What is a donor?" "When is a donor refused?" "Who may read a donor?"

Every question brings its passages in another order. vLLM's own prefix cache knows none of these prompts; kvgraft reuses
every passage that an earlier question had.
"""

from __future__ import annotations

import argparse
import json
import re
import urllib.request
from pathlib import Path

PASSAGE_CHARACTERS = 1_200


def main() -> None:
    """Answer the questions one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--passages", type=int, default=6, help="passages in front of a question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    passages = read_passages(args.folder)
    model = call(f"{args.url}/v1/models")["data"][0]["id"]
    for question in args.questions:
        found = retrieve(passages, question, args.passages)
        prompt = "\n\n".join([*found, f"Question: {question}\nAnswer:"])
        body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
        answer = call(f"{args.url}/v1/completions", body)
        report = answer["kv_transfer_params"]["kvgraft"]
        print(f"{question}\n  {' '.join(answer['choices'][0]['text'].split())}")
        reused = report["reused_tokens"]
        print(f"  {report['num_tokens']} prompt tokens, {reused} reused, {report['shifted_tokens']} of them moved\n")


def read_passages(folder: Path) -> list[str]:
    """Return the sections of all pages, long ones cut."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(folder.rglob("*.md"))]
    return [section[:PASSAGE_CHARACTERS] for page in pages for section in re.split(r"\n(?=#)", page)]


def retrieve(passages: list[str], question: str, count: int) -> list[str]:
    """Return the `count` passages that share most words with the question, the best one last."""
    wanted = words(question)
    return sorted(passages, key=lambda passage: len(wanted & words(passage)))[-count:]


def words(text: str) -> set[str]:
    """Return the longer words of a text."""
    return set(re.findall(r"\w{4,}", text.lower()))


def call(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """Return what the server answers to a JSON body, or to none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
