"""Speculative decoding from text alone. In a process of its own: what vLLM loads for it breaks later engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engines import engine, text
from kvgraft.graft.select import FirstK

_MINUTES = 10
DOCUMENT = text(5, 40) * 8
"""Of repeated text, so that drafts are found in it."""
PROMPT = text(2, 60) + DOCUMENT + text(4, 5) + DOCUMENT[:20]


@pytest.mark.parametrize("what", ["exactness", "repaired"])
def test_an_engine_that_drafts_from_text_is_grafted(model_folder, what):
    """vllm#46971, #14649, #50897, #56709, ascend#16131: speculative decoding beside external hits.

    There drafts overwrite the last block and what is kept of them is wrong, or hits are 0 for ever.
    """
    command = [sys.executable, __file__, str(model_folder), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def speculating(model_folder: Path, family: str, **options):
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {"min_saved_tokens": 0, **options}
    return engine(model_folder, family, options=options, speculative_config=speculation, num_gpu_blocks_override=400)


def exactness(model_folder: Path) -> None:
    """Answers are a full prefill's, and so are those over answers that became donors: one layer knows no context."""
    with speculating(model_folder, "llama-1-layer") as one:
        assert one.scheduler.refusal == ""
        counted = count_drafts(one)
        cold = one.cold(PROMPT, max_tokens=200)
        one.donate(text(1, 50) + DOCUMENT)
        warm = one.ask(PROMPT, max_tokens=200)
        assert warm.shifted > 0
        warm.assert_like(cold)
        one.forget_donors()
        made = one.ask(PROMPT, "exact", max_tokens=200)
        one.llm.reset_prefix_cache()
        later = text(7, 70) + list(made.tokens[:190]) + text(8, 30)
        expected = one.cold(later, max_tokens=60)
        one.forget_donors()
        one.ask(PROMPT, "exact", max_tokens=200)
        one.llm.reset_prefix_cache()
        grafted = one.ask(later, max_tokens=60)
        assert any(span["target_start"] == 70 for span in grafted.report["spans"]), "the answer is a donor"
        grafted.assert_like(expected)
        assert 0 < counted["accepted"] < counted["drafted"], "some drafts are accepted, and some are not"
        assert one.scheduler.counts.num_errors == 0
        one.check()


def repaired(model_folder: Path) -> None:
    """With all of the graft computed again answers are a full prefill's; a repair comes with the second token."""
    with speculating(model_folder, "llama", selection="first_k") as one:
        cold = one.cold(PROMPT, max_tokens=40)
        one.donate(text(1, 50) + DOCUMENT)
        one.worker._policy = FirstK(100_000)
        warm = one.ask(PROMPT, max_tokens=40, repair="before")
        assert warm.report["recomputed_tokens"] > 200, warm.report
        warm.assert_like(cold)
        one.forget_donors()
        one.donate(text(1, 50) + DOCUMENT)
        after = one.ask(PROMPT, max_tokens=40)
        assert (after.report["repair"]["time"], after.report["repair"]["from_token"]) == ("after", 2)
        assert one.scheduler.counts.num_errors == 0
        one.check()


def count_drafts(one) -> dict[str, int]:
    """Follow how many drafts vLLM verifies, and how many it takes."""
    counted = {"drafted": 0, "accepted": 0}
    make = one.vllm_scheduler.make_spec_decoding_stats

    def counts(stats, num_draft_tokens, num_accepted_tokens, **given):
        counted["drafted"] += num_draft_tokens
        counted["accepted"] += num_accepted_tokens
        return make(stats, num_draft_tokens, num_accepted_tokens, **given)

    one.vllm_scheduler.make_spec_decoding_stats = counts
    return counted


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]))
