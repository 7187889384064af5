"""How often rounding alone changes a greedy answer: the same prompts, exact throughout, computed in other pieces.

    python benchmarks/record.py exact-rounding -- python benchmarks/exact_rounding.py --model smollm2-135m

Every prompt is computed in full by itself, and then once more in each of these ways, none of which has anything approximate:

- `again`: in full by itself;
- `hit`: all but its last token is in the prefix cache;
- `pieces`: no more than `--rows` rows in a pass;
- `beside`: together with seven others.

Prints for each number format how many answers have another token than the first one, as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from kvgraft.engine import LLM, SamplingParams
from kvgraft.types import ReuseMode
from mixed_prompts import BUILTIN, mixed_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXACT = ReuseMode.EXACT
WAYS = ("again", "hit", "pieces", "beside")
_BESIDE = 8


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=400, help="longer prompts are cut")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    rows = []
    for dtype in args.dtypes.split(","):
        answers = answers_of(args, dtype)
        for way in WAYS:
            differ = first_differences(answers["first"], answers[way])
            rows.append({"dtype": dtype, "way": way, "prompts": args.prompts, **differ})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(
        json.dumps(
            {"model": args.model, "tokens": args.tokens, "prompt_tokens": args.prompt_tokens, "rows": rows}, indent=1
        )
    )
    return 0


def answers_of(args: argparse.Namespace, dtype: str) -> dict[str, list[tuple[int, ...]]]:
    """Return the answers to all prompts by way, and those of `first`."""
    options = {"dtype": dtype, "heal": "off"}
    sampling = SamplingParams(args.tokens, ignore_eos=True)
    found: dict[str, list[tuple[int, ...]]] = {}
    with closing(LLM(args.model, **options)) as llm:
        texts = [each.text for each in mixed_prompts(list(BUILTIN), args.prompts, seed=0)]
        prompts = [llm.tokenize(text)[-args.prompt_tokens :] for text in texts]
        found["first"] = [alone(llm, prompt, sampling) for prompt in prompts]
        found["again"] = [alone(llm, prompt, sampling) for prompt in prompts]
        found["hit"] = [hit(llm, prompt, sampling) for prompt in prompts]
        found["beside"] = [answer for batch in batches(prompts) for answer in together(llm, batch, sampling)]
    with closing(LLM(args.model, max_rows=args.rows, **options)) as llm:
        found["pieces"] = [alone(llm, prompt, sampling) for prompt in prompts]
    return found


def alone(llm: LLM, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """Answer a prompt of which nothing is known."""
    llm.reset()
    return llm.generate(prompt, sampling, EXACT)[0].token_ids


def hit(llm: LLM, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """Answer a prompt that is known but for its last token."""
    alone(llm, prompt, sampling)
    output = llm.generate(prompt, sampling, EXACT)[0]
    assert output.report.exact_tokens > len(prompt) // 2, output.report
    return output.token_ids


def together(llm: LLM, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Answer prompts side by side, of which nothing is known."""
    llm.reset()
    return [output.token_ids for output in llm.generate(list(prompts), sampling, EXACT)]


def batches(prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Cut into batches."""
    for start in range(0, len(prompts), _BESIDE):
        yield prompts[start : start + _BESIDE]


def first_differences(first: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> dict[str, object]:
    """Return how many answers differ, and at which token, from 1, the first of them does."""
    places = [
        next(place for place, (one, other) in enumerate(zip(*pair, strict=True), 1) if one != other)
        for pair in zip(first, others, strict=True)
        if pair[0] != pair[1]
    ]
    return {"differ": len(places), "earliest": min(places, default=None)}


if __name__ == "__main__":
    sys.exit(main())
