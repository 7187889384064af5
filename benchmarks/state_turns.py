"""Time to the first token of the next turn on a model with layers that keep a state: with and without recorded states.

    python benchmarks/state_turns.py [--family qwen3_5_text] [--lengths 512 1024 2048 4096] [--new 64] [--rounds 3]

A random model of 8 layers, hidden size 256. Per round and length of the conversation so far a new text is answered with 16
tokens; then its next turn, that text and the answer and `--new` tokens more, is asked for in mode `off`, which computes all
of it, and in mode `exact`, which goes on from the state at the end of the answer. The order of the two alternates, and one
token is drawn of each. Both must draw the same one, and `exact` must report the whole conversation as reused. Prints JSON:
the least times of all rounds, since what else the machine does only adds to them, and the bytes of a state and of a token.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

_ANSWER = SamplingParams(16, ignore_eos=True)
_FIRST = SamplingParams(1, ignore_eos=True)


def make_llm(family: str, num_layers: int, longest: int) -> LLM:
    """An engine over a random model, a quarter of its layers full attention."""
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "initializer_range": 0.02,  # what tiny models have instead magnifies rounding from layer to layer
        "max_position_embeddings": 4 * longest,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        * (num_layers // 4),
    }
    model = tiny_model(family, **sizes)
    return LLM(adopt_model(family, model, None), num_slots=4 * longest, max_running=2)


def next_turn(llm: LLM, rng: np.random.Generator, length: int, num_new: int, *, off_first: bool) -> dict[str, float]:
    """Seconds to the first token of a next turn, by mode, and of how many tokens nothing was computed.

    Raises:
        RuntimeError: The two modes do not draw the same token, or the conversation was not reused whole.
    """
    text = rng.integers(3, VOCABULARY, length)
    answer = llm.generate(text, _ANSWER, "exact")[0]
    # The answer's last token has not been computed when it ends.
    prompt = np.concatenate([text, answer.token_ids, rng.integers(3, VOCABULARY, num_new)])
    outputs = {}
    for mode in ("off", "exact") if off_first else ("exact", "off"):
        # Apart, or the state that the first of them leaves would be what the second goes on from.
        outputs[mode] = llm.generate(prompt, _FIRST, mode, cache_salt="off" if mode == "off" else "")[0]
    reused = outputs["exact"].report.exact_tokens
    if outputs["off"].token_ids != outputs["exact"].token_ids or reused != length + 15:
        raise RuntimeError(f"{reused} tokens reused of {length + 15}, {outputs['off'].token_ids} for all computed")
    return {mode: output.ttft_s for mode, output in outputs.items()}


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Least times by length."""
    llm = make_llm(args.family, args.layers, max(args.lengths) + args.new + 16)
    rng = np.random.default_rng(args.seed)
    next_turn(llm, rng, min(args.lengths), args.new, off_first=True)  # warms up
    times: dict[int, list[dict[str, float]]] = {length: [] for length in args.lengths}
    for number in range(args.rounds):
        for length in args.lengths:
            times[length].append(next_turn(llm, rng, length, args.new, off_first=number % 2 == 0))
            print(f"round {number + 1}, {length} tokens: {times[length][-1]}", file=sys.stderr)
    states, pool = llm.adapter.states, llm.adapter.pool
    assert states is not None
    rows = []
    for length, found in times.items():
        off, exact = (min(one[mode] for one in found) for mode in ("off", "exact"))
        rows.append({"tokens": length, "off_s": off, "exact_s": exact, "ratio": off / exact})
    return {
        "family": args.family,
        "layers": args.layers,
        "new_tokens": args.new,
        "rounds": args.rounds,
        "bytes_per_state": states.bytes_per_state,
        "bytes_per_token": pool.bytes_per_token,
        "turns": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--family", default="qwen3_5_text", help="architecture with linear_attention in its layer types"
    )
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--new", type=int, default=64, help="tokens that the next turn adds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(measure(parser.parse_args(arguments)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
