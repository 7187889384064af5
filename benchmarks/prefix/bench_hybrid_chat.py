"""K/V bytes that a long chat holds on a hybrid model: window slots of their own against one slot per token for all layers.

    python benchmarks/prefix/bench_hybrid_chat.py [--turns 40] [--window 64] [--reuse exact]

The same chat runs turn by turn through two engines in one process, on the same tiny random model with five window layers
per full-attention layer (Gemma 3's proportion): once as it comes (`SWARadixCache`, two spaces of slots), once with the
window layers in the full space (`RadixCache`, chosen as a back end). Both get the same number of full slots. Bytes are those
of slots that requests, the prefix cache or donors hold on the device, counted after every token; donors on the host are
listed besides. Then one request decodes alone, and what it holds is listed by output length. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import numpy as np

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.prefix import RadixCache, register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

_LAYERS = 6
_FULL_SPACE = "bench-full-space"


@dataclass(frozen=True, slots=True)
class TurnBytes:
    """K/V bytes on the device while and after a turn, and on the host after it."""

    held: int
    peak: int
    host: int


def make_llm(window: int, num_slots: int, backend: str) -> LLM:
    """An engine over a new copy of the same model."""
    model = tiny_model("gemma3_text", num_hidden_layers=_LAYERS, sliding_window=window, max_position_embeddings=32_768)
    return LLM(adopt_model("tiny-gemma3", model, None), num_slots=num_slots, max_running=1, radix_cache_backend=backend)


def run_turn(llm: LLM, prompt: np.ndarray, num_tokens: int, reuse: str) -> tuple[list[int], TurnBytes]:
    """Answer one turn; greedy."""
    tokens, peak = [], 0
    for part in llm.stream(prompt, SamplingParams(num_tokens, ignore_eos=True), reuse):
        tokens.append(part.token_id)
        peak = max(peak, llm.space.held_bytes)
    llm.check()
    return tokens, TurnBytes(llm.space.held_bytes, max(peak, llm.space.held_bytes), llm.space.host.used_bytes)


def chat(engines: dict[str, LLM], turns: int, args: argparse.Namespace) -> tuple[list[dict[str, object]], bool]:
    """Run the chat on all engines side by side; returns a row per turn and whether all tokens agree."""
    rng = np.random.default_rng(0)
    history = np.empty(0, np.int64)
    rows, agree = [], True
    for turn in range(1, turns + 1):
        prompt = np.concatenate([history, rng.integers(3, VOCABULARY, args.prompt_tokens)])
        answers = {name: run_turn(llm, prompt, args.output_tokens, args.reuse) for name, llm in engines.items()}
        tokens = [answer for answer, _ in answers.values()]
        agree = agree and all(answer == tokens[0] for answer in tokens)
        history = np.concatenate([prompt, tokens[0]])
        rows.append(
            {"turn": turn, "tokens": len(history), **{name: asdict(held) for name, (_, held) in answers.items()}}
        )
        print(f"turn {turn:3d}  {len(history):6d} tokens  " + held_text(answers), file=sys.stderr)
    return rows, agree


def held_text(answers: dict[str, tuple[list[int], TurnBytes]]) -> str:
    """One line of figures."""
    return "  ".join(f"{name} {held.held:>10,} B (peak {held.peak:,})" for name, (_, held) in answers.items())


def request_bytes(llm: LLM) -> int:
    """Bytes of the slots that running requests hold."""
    pool, space, num_tokens = llm.adapter.pool, llm.space, llm.usage().request
    windows = space.window_usage()
    if windows is None:
        return num_tokens * pool.bytes_per_token
    return num_tokens * pool.full_bytes_per_token + windows.request * pool.window.bytes_per_token


def decode(llm: LLM, num_tokens: int, every: int, args: argparse.Namespace) -> list[dict[str, int]]:
    """Bytes that one request holds, by tokens generated."""
    llm.reset()
    prompt = np.random.default_rng(1).integers(3, VOCABULARY, 2 * args.window)
    rows = []
    stream = llm.stream(prompt, SamplingParams(num_tokens, ignore_eos=True), args.reuse)
    for count, _ in enumerate(stream, start=1):
        if count % every == 1 and count < num_tokens:
            rows.append({"output_tokens": count, "request_bytes": request_bytes(llm)})
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=50, help="of one turn")
    parser.add_argument("--output-tokens", type=int, default=100, help="of one turn")
    parser.add_argument("--reuse", default="exact", choices=("off", "exact", "graft"))
    args = parser.parse_args()
    register_radix_cache_backend(_FULL_SPACE, lambda context: RadixCache(context.page_size))
    num_slots = args.turns * (args.prompt_tokens + args.output_tokens) + 64
    engines = {name: make_llm(args.window, num_slots, b) for name, b in (("hybrid", "default"), ("full", _FULL_SPACE))}
    rows, agree = chat(engines, args.turns, args)
    hybrid, full = rows[-1]["hybrid"], rows[-1]["full"]
    peaks = {name: max(row[name]["peak"] for row in rows) for name in engines}
    pool = engines["hybrid"].adapter.pool
    result = {
        "settings": vars(args),
        "slots": {"full": pool.num_slots, "window": pool.num_window_slots},
        "bytes_per_token": {"full_layers": pool.full_bytes_per_token, "window_layers": pool.window.bytes_per_token},
        "tokens_agree": agree,
        "held_at_end": {
            "hybrid": hybrid["held"],
            "full": full["held"],
            "ratio": round(hybrid["held"] / full["held"], 3),
        },
        "peak": peaks | {"ratio": round(peaks["hybrid"] / peaks["full"], 3)},
        "per_turn": rows,
        "decode": {name: decode(llm, 8 * args.window, args.window, args) for name, llm in engines.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
