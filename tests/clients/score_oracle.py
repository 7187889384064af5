"""What `LLM.score` says of texts behind contexts; run by `.venv`'s Python, which has torch, with questions on stdin."""

from __future__ import annotations

import json
import sys

from kvgraft.engine import LLM


def main() -> None:
    """Print, for each (context, continuation), the log-probability of the continuation and whether it is the greedy one."""
    asked = json.load(sys.stdin)
    llm = LLM(asked["model"], num_slots=2000)
    tokenizer = llm.loaded.tokenizer
    answers = []
    for context, continuation in asked["pairs"]:
        ids = tokenizer.encode(context, add_special_tokens=False)
        rest = tokenizer.encode(context + continuation, add_special_tokens=False)[len(ids) :]
        logprobs = llm.score(ids, rest, reuse="off").logits.log_softmax(-1)
        greedy = logprobs.argmax(-1).tolist() == rest
        answers.append([sum(float(row[token]) for row, token in zip(logprobs, rest, strict=True)), greedy])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
