"""What K/V of 8 bits do to the first token in a real vLLM: without reuse, over plain copies, and over repaired ones.

    python benchmarks/record.py fp8-kv-smollm2 -- .venv-vllm/bin/python benchmarks/engines/fp8_kv.py FOLDER

An engine per type of K/V, one after the other, each asked for the same prompts in their order: prompts before are its donors.
KL is from the full prefill with the same K/V, over the whole vocabulary; `prefill` is a full prefill with these K/V against
one with K/V in the model's type. Only prompts with reused tokens in every engine count. JSON goes to standard output,
progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import AutoTokenizer

from kvgraft.bench.serve_workload import BUILTIN_RAG, load_workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAYS = ("prefill", "after", "before")
RESAMPLES = 4_000


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a model that vLLM loads")
    parser.add_argument("--pack", default=BUILTIN_RAG, help="request pack, as for kvgraft bench serve")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--max-prompt", type=int, default=2_000, help="longest prompt in tokens")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument(
        "--kv", nargs="+", default=["auto", "fp8", "fp8_e5m2"], help="types of K/V; the first is compared to"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # of a process that has one engine
    args = parser.parse_args()
    if args.into is not None:
        np.savez(args.into, **asked(args))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {kv: measured(kv, Path(folder) / f"{kv}.npz") for kv in args.kv}
    print(json.dumps({**vars(args), "model": args.model.name, **summary(found, args)}, indent=1, default=str))
    return 0


def measured(kv: str, into: Path) -> dict[str, NDArray]:
    """Run an engine with K/V of type `kv` in a process of its own."""
    command = [sys.executable, *sys.argv, "--kv", kv, "--into", str(into)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    with np.load(into) as arrays:
        return dict(arrays)


def asked(args: argparse.Namespace) -> dict[str, NDArray]:
    """Ask this engine for everything; float32 log-probabilities `(requests, vocabulary)` per way, and reused tokens."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        kv_cache_dtype=args.kv[0],
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_logprobs=-1,
        kv_transfer_config=KVTransferConfig(
            kv_connector="GraftConnector",
            kv_connector_module_path="kvgraft.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"lookup_deadline_ms": 1e9, "repair_below_margin": 0},
        ),
    )

    def ask(prompt: list[int], mode: str, repair: str = "after", logprobs: int | None = -1) -> tuple[NDArray, int]:
        llm.reset_prefix_cache()
        extra = {"kv_transfer_params": {"kvgraft": mode, "kvgraft_repair": repair}}
        parameters = SamplingParams(temperature=0, max_tokens=2, logprobs=logprobs, detokenize=False, extra_args=extra)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        first = output.outputs[0].logprobs[0] if logprobs else {}
        found = np.full(max(first, default=-1) + 1, -np.inf, np.float32)
        found[list(first)] = [entry.logprob for entry in first.values()]
        return found, output.kv_transfer_params["kvgraft"]["shifted_tokens"]

    rows: dict[str, list[NDArray | int]] = {name: [] for name in (*WAYS, "shifted", "num_tokens")}
    for number, prompt in enumerate(prompts(args)):
        after, shifted = ask(prompt, "graft")
        before, _ = ask(prompt, "graft", "before")
        full, _ = ask(prompt, "off")
        ask(prompt, "exact", logprobs=None)
        for name, value in zip(rows, (full, after, before, shifted, len(prompt)), strict=True):
            rows[name].append(value)
        print(args.kv[0], number, len(prompt), shifted, file=sys.stderr, flush=True)
    return {name: np.array(values) for name, values in rows.items()}


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return the first requests of the pack that are short enough, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoded = (tokenizer.encode(prompt) for prompt in load_workload(args.pack, 4 * args.requests, args.seed).prompts)
    return [tokens for tokens in encoded if len(tokens) <= args.max_prompt][: args.requests]


def summary(found: dict[str, dict[str, NDArray]], args: argparse.Namespace) -> dict[str, object]:
    """Return, per type of K/V and way: mean KL with its 95 % interval, and how often the most likely token is another."""
    kept = np.all([arrays["shifted"] > 0 for arrays in found.values()], axis=0)
    if not kept.any():
        raise SystemExit("no prompt has reused tokens; ask for more requests, or longer prompts")
    drawn = np.random.default_rng(args.seed).integers(int(kept.sum()), size=(RESAMPLES, int(kept.sum())))
    first, *_ = found.values()
    table: dict[str, object] = {}
    for kv, arrays in found.items():
        own = arrays["prefill"][kept]
        for way in WAYS:
            expected, actual = (first["prefill"][kept], own) if way == "prefill" else (own, arrays[way][kept])
            kl = (np.exp(expected) * np.where(np.isfinite(expected), expected - actual, 0)).sum(1, dtype=np.float64)
            low, high = np.quantile(kl[drawn].mean(1), [0.025, 0.975])
            flips = (expected.argmax(1) != actual.argmax(1)).mean()
            table[f"{kv} {way}"] = {"kl": kl.mean(), "kl_ci": [low, high], "median_kl": np.median(kl), "flips": flips}
    reused = float(first["shifted"][kept].sum() / first["num_tokens"][kept].sum())
    return {"n": int(kept.sum()), "reused_share": reused, "table": {k: _floats(v) for k, v in table.items()}}


def _floats(row: object) -> object:
    return json.loads(json.dumps(row, default=float))


if __name__ == "__main__":
    sys.exit(main())
