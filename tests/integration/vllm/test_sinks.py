"""Models with attention sinks: nothing can be looked at, so that `first_k` chooses unless the settings name a policy."""

from __future__ import annotations

from engines import engine, text
from kvgraft.graft.select import FirstK

DOCUMENT = text(5, 400)
PROMPT = text(2, 60) + DOCUMENT + text(4, 45)
KNOWN = text(1, 50) + DOCUMENT + text(3, 40)


def test_what_cannot_be_looked_at_is_chosen_from_by_its_place(model_folder):
    with engine(model_folder, "gpt-oss", num_gpu_blocks_override=400) as one:
        cold = one.cold(PROMPT)
        one.donate(KNOWN)
        assert one.scheduler.refusal == one.worker.refusal == ""
        answer = one.ask(PROMPT)
        report = answer.report
        assert (report["policy"], report["miss"]) == ("first_k", None)
        assert report["shifted_tokens"] + report["recomputed_tokens"] == len(DOCUMENT)
        assert report["shifted_tokens"] > 300
        assert one.worker.description["selection"] == "first_k"
        one.forget_donors()
        cold.assert_like(one.ask(PROMPT, "off"))
        assert one.scheduler.counts.num_errors == 0
        one.check()


def test_all_of_it_computed_again_answers_as_a_full_prefill(model_folder):
    with engine(model_folder, "gpt-oss", num_gpu_blocks_override=400) as one:
        cold = one.cold(PROMPT)
        one.donate(KNOWN)
        one.worker._policy = FirstK(100_000)
        answer = one.ask(PROMPT, repair="before")
        assert answer.report["recomputed_tokens"] == len(DOCUMENT)
        answer.assert_like(cold)


def test_a_policy_that_the_settings_name_is_refused_as_before(model_folder):
    with engine(model_folder, "gpt-oss", options={"selection": "query_seam"}, num_gpu_blocks_override=400) as one:
        one.ask(text(9, 20), "off", max_tokens=1)
        assert "layers with attention sinks; use selection='first_k'" in one.worker.refusal
        assert one.ask(PROMPT).report["miss"]["reason"] == "model_refused"
