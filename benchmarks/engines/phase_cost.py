"""What SGLang gains by `phase_cost_tokens`: short runs are copied or computed, and each copied one costs a scheduler step.

    python benchmarks/engines/make_smollm2.py runs/smollm2
    python benchmarks/record.py sglang-phase-cost -- python benchmarks/engines/phase_cost.py --pack ../shared/data/dev/tools

A server without reuse and one per value, all running; every prompt of the pack goes to them in turn, the first `--warmup` of
them untimed. JSON goes to standard output: seconds to the first token by side, and medians of the ratio to `off`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from suite_servers import ENGINES, EngineServer, Reply, Site
from tokenizers import Tokenizer
from vllm_ttft import say

from kvgraft.bench.serve_workload import BUILTIN_RAG, load_workload

OFF = "off"
_AFTER_S = 0.2
"""What a server does after an answer is not part of the next one."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="folder that make_smollm2.py wrote")
    parser.add_argument("--pack", default=BUILTIN_RAG, help="request pack, as for kvgraft bench serve")
    parser.add_argument("--values", type=int, nargs="+", default=[32, 96], help="of phase_cost_tokens")
    parser.add_argument("--min-prompt", type=int, default=1_000, help="shortest prompt in tokens")
    parser.add_argument("--max-prompt", type=int, default=4_000, help="longest prompt in tokens")
    parser.add_argument("--warmup", type=int, default=20, help="prompts that are not timed")
    parser.add_argument("--requests", type=int, default=20, help="timed prompts")
    parser.add_argument("--port", type=int, default=31_800)
    args = parser.parse_args()
    found: dict[str, list[Reply]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {}
        for number, side in enumerate([OFF, *map(str, args.values)]):
            say(f"{side}: starting")
            servers[side] = stack.enter_context(server_of(side, args, Path(folder) / side, args.port + 20 * number))
            servers[side].pause()
        for number, prompt in enumerate(prompts(args)):
            for side, server in servers.items():
                server.resume()
                reply = server.ask(prompt)
                time.sleep(_AFTER_S)
                server.pause()
                if number >= args.warmup:
                    found.setdefault(side, []).append(reply)
            say(f"{number + 1} of {args.warmup + args.requests} prompts")
    print(json.dumps({**vars(args), "model": args.model.name, "sides": summary(found)}, indent=1))
    return 0


def server_of(side: str, args: argparse.Namespace, folder: Path, port: int) -> EngineServer:
    """Return a server without reuse, or with kvgraft and this value."""
    folder.mkdir()
    site = Site(args.model.resolve(), 2, args.max_prompt + 96, folder)
    engine, variant = ENGINES["SGLang"], OFF if side == OFF else "kvgraft"
    setting = {} if side == OFF else {"KVGRAFT_PHASE_COST_TOKENS": side}
    return EngineServer(
        replace(engine, environ=lambda site, variant: engine.environ(site, variant) | setting), variant, site, port
    )


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts of the pack that have a fitting length, as token ids, the first ones."""
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    wanted = args.warmup + args.requests
    texts = load_workload(args.pack, 4 * wanted, 0).prompts
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    return [ids for ids in encoded if args.min_prompt <= len(ids) <= args.max_prompt][:wanted]


def summary(found: dict[str, list[Reply]]) -> dict[str, object]:
    """Return, per side: seconds, their mean, the median of how many times sooner than `off`, and the share reused."""
    off = [reply.seconds for reply in found[OFF]]
    return {
        side: {
            "mean_s": statistics.mean(reply.seconds for reply in replies),
            "sooner": statistics.median(base / reply.seconds for base, reply in zip(off, replies, strict=True)),
            "reused_share": sum(r.reused_tokens for r in replies) / sum(r.prompt_tokens for r in replies),
            "seconds": [round(reply.seconds, 3) for reply in replies],
        }
        for side, replies in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
