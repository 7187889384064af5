"""Tokens that sessions of recorded agent clients compute on stock vLLM and SGLang, with exact prefixes and with grafts.

    python benchmarks/record.py agent-traces-vllm -- python benchmarks/engines/agent_traces.py vLLM --packs FOLDER

Prompts go over HTTP, as token ids, one after the other, each with an answer of two tokens. One server with kvgraft serves all
runs; each has a salt of its own, so that none finds what another left. `--seeds` serves the first prompt of another client
before, as on a server that has read something. A random model of two layers and 65,536 positions: what is counted is found,
computed and kept, never an answer. Per run: the sum of computed tokens (repairs are part of them), the bound (tokens in no
run of 16 or more that an earlier prompt had), and the largest lead of exact prefixes over grafts at any prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from suite_servers import ENGINES, EngineServer, Site
from transformers import AutoTokenizer
from vllm_server import MODEL_NAME
from vllm_ttft import say

from kvgraft.bench.recorded import POSITIONS, bound_of, read_pack, two_random_layers
from kvgraft.bench.server_process import end_on_sigterm
from kvgraft.models import smollm2_path

if TYPE_CHECKING:
    from collections.abc import Callable

    Prompt = list[int]

MODES = ("exact", "graft")
_KV_TOKENS = {"vLLM": 46_000, "SGLang": 1_500_000}
"""Of vLLM in tokens of SmolLM2: 2 GiB, which hold four million of this model's."""
_SECONDS = 600.0


def main() -> int:
    """Print the record's JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("vLLM", "SGLang"))
    parser.add_argument("--packs", type=Path, required=True, help="folder of CLIENT.jsonl.gz")
    parser.add_argument("--clients", nargs="*", help="all of the folder if left out")
    parser.add_argument("--seeds", nargs="*", default=["none"], help="clients, `none`, or `all` of them")
    parser.add_argument("--port", type=int, default=8471)
    args = parser.parse_args()
    end_on_sigterm()
    clients = args.clients or sorted(path.name.removesuffix(".jsonl.gz") for path in args.packs.glob("*.jsonl.gz"))
    if not clients:
        raise SystemExit(f"there is no pack in {args.packs}; name the folder of CLIENT.jsonl.gz")
    seeds = ["none", *clients] if args.seeds == ["all"] else args.seeds
    with tempfile.TemporaryDirectory(prefix="kvgraft-traces-") as folder:
        model = Path(folder) / "model"
        save_model(model)
        site = Site(model, 2, POSITIONS, Path(folder), kv_tokens=_KV_TOKENS[args.engine])
        with EngineServer(ENGINES[args.engine], "kvgraft", site, args.port) as server:
            ask = {"vLLM": ask_vllm, "SGLang": ask_sglang}[args.engine]
            pairs = [(client, seed) for client in clients for seed in seeds if seed != client]
            rows = [trace(args.packs, client, seed, lambda *asked: ask(server.url, *asked)) for client, seed in pairs]
    print(json.dumps({"engine": args.engine, "clients": clients, "seeds": seeds, "rows": rows}))
    return 0


def trace(packs: Path, client: str, seed: str, ask: Callable[[Prompt, str, str], dict[str, Any]]) -> dict[str, Any]:
    """Replay one client's sessions in both modes."""
    first = [] if seed == "none" else read_pack(packs / f"{seed}.jsonl.gz", 1)
    own = read_pack(packs / f"{client}.jsonl.gz")
    sums = {}
    for mode in MODES:
        reports = [ask(prompt.tolist(), mode, f"{client} after {seed}, {mode}") for prompt in (*first, *own)]
        sums[mode] = np.cumsum([report["computed_tokens"] for report in reports[len(first) :]])
    row = {
        "client": client,
        "seed": seed,
        "prompts": len(own),
        "tokens": sum(map(len, own)),
        "bound": bound_of(first, own),
        **{mode: int(computed[-1]) for mode, computed in sums.items()},
        "worst_lead_of_exact": int((sums["graft"] - sums["exact"]).max()),
    }
    say(json.dumps(row))
    return row


def ask_vllm(url: str, prompt: Prompt, mode: str, salt: str) -> dict[str, Any]:
    """Return the report of a completion."""
    sampling = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    params = {"cache_salt": salt, "kv_transfer_params": {"kvgraft": mode}}
    answer = post(f"{url}/v1/completions", {"model": MODEL_NAME, "prompt": prompt, **sampling, **params})
    report: dict[str, Any] = answer["kv_transfer_params"]["kvgraft"]
    return report


def ask_sglang(url: str, prompt: Prompt, mode: str, salt: str) -> dict[str, Any]:
    """Return the report of an answer of `/generate`, of its last attempt."""
    sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True, "custom_params": {"kvgraft": mode}}
    answer = post(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling, "extra_key": salt})
    report: dict[str, Any] = answer["meta_info"]["kvgraft"][-1]["report"]
    return report


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask a server on this machine."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def save_model(folder: Path) -> None:
    """Save a random model of two layers with SmolLM2's tokenizer."""
    source = smollm2_path()
    if source is None:
        raise SystemExit("SmolLM2's tokenizer is not installed; run `make venv`")
    two_random_layers(0).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
