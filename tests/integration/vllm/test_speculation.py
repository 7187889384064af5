"""Speculative decoding: refused by name. In a process of its own: what vLLM loads for it breaks later engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engines import engine, text

_MINUTES = 10


def test_an_engine_that_speculates_is_served_without_reuse(model_folder):
    """vllm#46971, #14649, #50897, #56709, ascend#16131: speculative decoding beside external hits.

    There drafts overwrite the last block and what is kept of them is wrong, or hits are 0 for ever. Here such an engine is
    refused by name: it keeps nothing, and answers.
    """
    command = [sys.executable, __file__, str(model_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def speculate(model_folder: Path) -> None:
    """Ask a speculating engine twice for one answer."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    with engine(model_folder, "llama-1-layer", speculative_config=speculation) as one:
        assert one.scheduler.refusal == "speculative decoding is not supported"
        prompt = text(1, 50) * 3
        first, again = (one.ask(prompt, max_tokens=20) for _ in range(2))
        assert first.tokens == again.tokens
        assert "speculative decoding" in again.report["miss"]["detail"]
        assert not len(one.scheduler.registry.catalogue)


if __name__ == "__main__":
    speculate(Path(sys.argv[1]))
