"""Many known prompts at once: the rows of grafts and repairs in one step stay within the limit, and answers are the same."""

from __future__ import annotations

import pytest

from engines import engine, text
from kvgraft.integrations.vllm.worker.graft_job import GraftJob
from kvgraft.integrations.vllm.worker.graft_worker import GraftWorker

LIMIT = 400
DOCUMENTS = [text(40, 300), text(41, 270)]
PROMPTS = [text(60 + number, 90 + number) + DOCUMENTS[number % 2] + text(80 + number, 40) for number in range(8)]


@pytest.mark.parametrize("load", ["auto", "async"])
@pytest.mark.parametrize(
    ("limit", "step_tokens"), [(LIMIT, 2_048), (2_048, 2 * LIMIT)], ids=["setting", "step of vLLM"]
)
def test_no_step_computes_more_rows_than_its_limit(load, limit, step_tokens, model_folder, monkeypatch):
    rows = []
    begin, advance = GraftWorker.load, GraftJob.step

    def begins(worker, commands):
        rows.append(0)
        begin(worker, commands)

    def advances(job, max_rows):
        rows[-1] += (count := advance(job, max_rows))
        return count

    monkeypatch.setattr(GraftWorker, "load", begins)
    monkeypatch.setattr(GraftJob, "step", advances)
    options = {"load": load, "max_generation": 0, "max_recompute_tokens_per_step": limit, "min_saved_tokens": 0}
    with engine(model_folder, "llama", options=options, max_num_batched_tokens=step_tokens) as one:
        one.ask(text(9, 20), "off", max_tokens=1)
        one.donate(*DOCUMENTS)
        burst = one.ask_many(PROMPTS, [None] * len(PROMPTS))
        assert sum(rows) > 2 * LIMIT
        assert max(rows) <= LIMIT
        for prompt, answer in zip(PROMPTS, burst, strict=True):
            assert answer.report["repair"]["from_token"] == 2
            one.forget_donors()
            one.donate(*DOCUMENTS)
            alone = one.ask(prompt)
            assert answer.tokens == alone.tokens
            answer.assert_like(alone, tolerance=1e-5)
            assert answer.report["recomputed_runs"] == alone.report["recomputed_runs"]
        assert one.scheduler.counts.num_errors == 0
        one.check()
