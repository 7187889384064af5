"""Time a burst of requests with one new system prompt in a real vLLM, by what a graft does about blocks without K/V.

All requests arrive at once: the system prompt is new, each one's document has been read behind another text. vLLM lets all of
them hit the blocks that the first one computes in the same step. What a graft may do about it:

- `off`: no graft at all;
- `wait` (what kvgraft does): the request is admitted in the next step;
- `void`: the request is admitted without its graft, and computed;
- `unsafe` (what kvgraft did): the pass reads the blocks as they are. For comparison alone: answers are wrong.

    python benchmarks/engines/vllm_burst.py MODEL

JSON goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

VARIANTS = ("off", "wait", "void", "unsafe")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--document-tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--selection", default="none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    rng = random.Random(args.seed)
    llm = started(args)
    documents = [words(rng, args.document_tokens) for _ in range(args.requests)]
    ask(llm, [words(rng, 48) + document for document in documents], "exact")
    rows = []
    for number in range(args.rounds + 1):  # the first is not counted
        for variant in rng.sample(VARIANTS, len(VARIANTS)):
            system = words(rng, args.system_tokens)
            llm.reset_prefix_cache()
            with about_blocks(variant):
                row = ask(
                    llm, [system + each + words(rng, 24) for each in documents], "off" if variant == "off" else "graft"
                )
            if number:
                rows.append({"variant": variant, "round": number, **row})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"arguments": vars(args), "summary": summary(rows), "rows": rows}, indent=1))
    return 0


def started(args: argparse.Namespace) -> LLM:
    """An engine in this process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=args.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=args.requests,
        block_size=32,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="GraftConnector",
            kv_connector_module_path="kvgraft.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"selection": args.selection, "lookup_deadline_ms": 1e9},
        ),
    )


def words(rng: random.Random, count: int) -> list[int]:
    """Token ids without meaning: what is timed does not depend on it."""
    return [rng.randrange(100, 5000) for _ in range(count)]


def ask(llm: LLM, prompts: list[list[int]], mode: str) -> dict[str, float]:
    """Ask everything at once for one token each."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {"kvgraft": mode}}
    )
    started_at = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    seconds = time.perf_counter() - started_at
    reports = [output.kv_transfer_params["kvgraft"] for output in outputs]
    first = sorted(output.metrics.first_token_latency for output in outputs)
    return {
        "seconds": seconds,
        "median_ttft_s": statistics.median(first),
        "last_ttft_s": first[-1],
        "shifted": sum(report["shifted_tokens"] for report in reports),
        "exact": sum(report["exact_tokens"] for report in reports),
        "prompt_tokens": sum(map(len, prompts)),
    }


@contextmanager
def about_blocks(variant: str) -> Iterator[None]:
    """Let grafts treat blocks without K/V as a variant does."""
    from kvgraft.integrations.vllm.scheduler.graft_scheduler import GraftScheduler
    from kvgraft.integrations.vllm.scheduler.pending_blocks import HitState, PendingBlocks
    from kvgraft.types import Miss, MissReason

    match = GraftScheduler.match

    def voided(self: GraftScheduler, request: object, *args: object) -> tuple[int | None, bool]:
        found = match(self, request, *args)
        if found[0] is not None:
            return found
        self._attempts.compute(request.request_id, Miss(MissReason.NO_ROOM, "void"))
        return 0, False

    if variant == "unsafe":
        with patch.object(PendingBlocks, "hit_of", lambda self, request: HitState.COMPUTED):
            yield
    elif variant == "void":
        with patch.object(GraftScheduler, "match", voided):
            yield
    else:
        yield


def summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians by variant, and ratios to `off` of the same round."""
    found = {}
    off = {row["round"]: row for row in rows if row["variant"] == "off"}
    for variant in VARIANTS:
        mine = [row for row in rows if row["variant"] == variant]
        found[variant] = {
            key: round(statistics.median(row[key] for row in mine), 3)
            for key in ("seconds", "median_ttft_s", "last_ttft_s", "shifted", "exact", "prompt_tokens")
        }
        for key in ("seconds", "median_ttft_s"):
            ratios = [off[row["round"]][key] / row[key] for row in mine]
            found[variant][f"{key}_sooner_than_off"] = round(statistics.median(ratios), 2)
    return found


if __name__ == "__main__":
    sys.exit(main())
