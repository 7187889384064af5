"""The embedded engine as a process of its own: reads prompts as JSON lines, answers each with its time to first token.

`two_commits.py` starts one per checkout, with the sources of that checkout in `PYTHONPATH`.
"""

from __future__ import annotations

import json
import sys
import time

from kvgraft.engine import LLM, SamplingParams

_VOCABULARY = 4_096
"""Of graft-tiny, the smallest model."""


def main() -> int:
    """Answer until standard input ends."""
    llm = LLM(sys.argv[1], num_slots=32_768)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        prompt = [token % _VOCABULARY for token in json.loads(line)]
        started = time.perf_counter()
        (output,) = llm.generate(prompt, SamplingParams(1, ignore_eos=True))
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        print(json.dumps({"ms": elapsed_ms, "cached": output.report.reused_tokens}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
