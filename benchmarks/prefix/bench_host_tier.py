"""Time to first token of a prompt that is cold, in host memory, and on the device, in one process and one after another.

    python benchmarks/prefix/bench_host_tier.py [--model graft-tiny] [--tokens 4096] [--rounds 5] [--json]

Each round takes a new prompt: cold; again (device); again after others have taken the device's slots (host). The model's own
greedy token must be the same all three times.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import numpy as np

from kvgraft.engine import LLM, SamplingParams

ONE = SamplingParams(1, ignore_eos=True)


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    result = measure(args.model, args.tokens, args.rounds)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for kind in ("cold_ms", "host_ms", "device_ms"):
        print(f"{kind:10} {result[kind]:9.2f}")
    print(f"cold / host {result['cold_over_host']:.1f}, host / device {result['host_over_device']:.1f}")


def measure(model: str, num_tokens: int, rounds: int) -> dict[str, float | int | str]:
    """Return medians in milliseconds and what they say about each other."""
    num_slots = num_tokens + 256
    llm = LLM(model, num_slots=num_slots, prefix_host_bytes=1 << 30, host_bytes=0, max_model_len=num_tokens + 128)
    rng = np.random.default_rng(20261122)
    times: dict[str, list[float]] = {"cold": [], "host": [], "device": []}
    for number in range(rounds + 1):
        prompt, other = (rng.integers(3, llm.loaded.vocab_size, num_tokens) for _ in range(2))
        cold = _timed(llm, prompt, 0)
        device = _timed(llm, prompt, num_tokens - 1)
        _timed(llm, other, 0)  # needs every slot
        host = _timed(llm, prompt, num_tokens - 1)
        if len({cold[1], device[1], host[1]}) != 1:
            raise SystemExit("the answers differ: the figures would mean nothing")
        if number:  # the first round warms up
            for kind, (seconds, _) in (("cold", cold), ("host", host), ("device", device)):
                times[kind].append(seconds * 1e3)
    llm.check()
    cold_ms, host_ms, device_ms = (median(times[kind]) for kind in ("cold", "host", "device"))
    return {
        "model": model,
        "tokens": num_tokens,
        "rounds": rounds,
        "bytes_per_token": llm.adapter.pool.bytes_per_token,
        "cold_ms": cold_ms,
        "host_ms": host_ms,
        "device_ms": device_ms,
        "cold_over_host": cold_ms / host_ms,
        "host_over_device": host_ms / device_ms,
    }


def _timed(llm: LLM, prompt: np.ndarray, exact_tokens: int) -> tuple[float, int]:
    output = llm.generate(prompt, ONE, "exact")[0]
    if output.report.exact_tokens != exact_tokens:
        raise SystemExit(f"{output.report.exact_tokens} tokens were reused, not {exact_tokens}")
    return output.ttft_s, output.token_ids[0]


if __name__ == "__main__":
    main()
