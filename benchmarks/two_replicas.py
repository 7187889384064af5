"""Two engines that share a store, on one stream of requests, against two that do not and against one alone.

    python benchmarks/two_replicas.py PACK --json

The stream is dealt to the engines in turn, one request after another in one process, so that no time is of two requests at
once. Engines that share know of one another's donors through the store alone, as soon as these are written and seen there:
no request waits for that. Reused share: of all prompt tokens, those that were not computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass

from kvgraft.bench.packs import load_pack
from kvgraft.engine import LLM, SamplingParams
from kvgraft.errors import KVGraftError


@dataclass(frozen=True, slots=True)
class Served:
    """One request.

    Attributes:
        tokens: Of its prompt.
        reused: Of them, not computed.
        from_store: Of them, of spans that were read from the store.
        ttft_s: Seconds to its first token.
    """

    tokens: int
    reused: int
    from_store: int
    ttft_s: float


def serve(args: argparse.Namespace, prompts: list[str], num_engines: int, store: str) -> list[Served]:
    """Deal the prompts to fresh engines."""
    engines = [LLM(args.model, store=store, num_slots=args.num_slots) for _ in range(num_engines)]
    served = []
    try:
        for number, prompt in enumerate(prompts):
            output = engines[number % num_engines].generate(prompt, SamplingParams(4, ignore_eos=True))[0]
            report = output.report
            far = sum(span.length for span in report.spans if span.tier not in ("device", "host"))
            served.append(Served(report.num_tokens, report.reused_tokens, far, output.ttft_s))
    finally:
        for engine in engines:
            engine.close()
    return served


def summarise(served: list[Served]) -> dict[str, float]:
    """Figures of one deal."""
    tokens = sum(request.tokens for request in served)
    times = sorted(request.ttft_s for request in served)
    return {
        "reused_share": sum(request.reused for request in served) / tokens,
        "from_store_share": sum(request.from_store for request in served) / tokens,
        "ttft_mean_s": statistics.fmean(times),
        "ttft_p50_s": statistics.median(times),
    }


def main() -> int:
    """Measure and print."""
    args = _parse()
    try:
        (workload,) = load_pack(args.pack)
        prompts = list(workload.sessions[0].requests)[: args.requests]
        with tempfile.TemporaryDirectory(prefix="kvgraft-replicas-") as folder:
            deals = {
                "one": serve(args, prompts, 1, "host"),
                "two apart": serve(args, prompts, 2, "host"),
                "two sharing": serve(args, prompts, 2, f"file:{folder}"),
            }
    except KVGraftError as error:
        print(f"two_replicas: {error}", file=sys.stderr)
        return 2
    summary = {name: summarise(served) for name, served in deals.items()}
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "pack"} | {"pack": workload.name}
        requests = {name: [asdict(request) for request in served] for name, served in deals.items()}
        print(json.dumps({"settings": settings, "summary": summary, "requests": requests}, indent=1))
    else:
        for name, figures in summary.items():
            print(f"{name:12s}" + "".join(f"{key} {value:8.3f}  " for key, value in figures.items()))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", help="request pack, such as shared/data/dev/rag")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=60, help="the first so many of the pack")
    parser.add_argument("--num-slots", type=int, default=16_384)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
