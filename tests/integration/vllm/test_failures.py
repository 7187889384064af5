"""Whatever fails in reuse is a counted miss: the request is computed and answers as a full prefill does.

What fails after the first token is the subject of `test_repair_after.py`.
"""

from __future__ import annotations

import pytest
from policies import FailsLater

from engines import engine, text
from kvgraft.errors import StoreError
from kvgraft.graft.select import Recompute
from kvgraft.reuse.report import report_as_dict

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
PROMPT = OTHER_HEAD + DOCUMENT + OTHER_QUESTION


@pytest.fixture(
    scope="module",
    params=[("llama", "sync"), ("llama", "async"), ("gemma3", "auto")],
    ids="-".join,
)
def served(request, model_folder):
    family, load = request.param
    with engine(model_folder, family, options={"load": load, "repair": "before"}, num_gpu_blocks_override=700) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    served.scheduler.counts.num_errors = 0
    served.scheduler._lookup._recent_ms_per_token.clear()
    yield
    served.check()


def errors(served):
    return served.scheduler.counts.num_errors


def test_a_donor_that_cannot_be_read_is_computed(served, monkeypatch):
    cold = served.cold(PROMPT)
    served.donate(HEAD + DOCUMENT + QUESTION)

    def unreadable(*args, **kwargs):
        raise StoreError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(served.worker._donors, "get", unreadable)
        answer = served.ask(PROMPT)
    answer.assert_like(cold)
    assert answer.shifted == 0
    assert answer.num_cached == 0, "all of it was computed"
    assert "gone" in answer.report["miss"]["detail"]
    assert answer.report["miss"]["reason"] == "error"
    served.llm.reset_prefix_cache()
    assert served.ask(OTHER_HEAD + DOCUMENT + text(9, 40)).shifted > 0, "the next one is grafted again"


def test_an_answer_of_one_token_is_reported_and_counted_like_longer_ones(served, monkeypatch):
    """vLLM asks for its report before it hands the workers' over; classifiers and judges end so."""
    reports, counted = [], []
    count = served.scheduler.counts.request
    monkeypatch.setattr(served.scheduler.counts, "request", lambda report: counted.append(report) or count(report))
    for max_tokens in (2, 1):
        served.forget_donors()
        served.donate(HEAD + DOCUMENT + QUESTION)
        counted.clear()
        reports.append(served.ask(PROMPT, max_tokens=max_tokens).report)
        assert [report_as_dict(report) for report in counted] == reports[-1:]
    served.llm.reset_prefix_cache()
    figures = ("shifted_tokens", "recomputed_tokens", "corrected_tokens", "computed_tokens")
    longer, short = ([report[name] for name in figures] for report in reports)
    assert short == longer
    assert short[1] > 0
    assert short[2] > 0
    monkeypatch.setattr(served.worker._donors, "get", _fails)
    failed = served.ask(OTHER_HEAD + DOCUMENT + text(11, 40), max_tokens=1).report
    assert (failed["shifted_tokens"], failed["miss"]["reason"]) == (0, "error")


def test_a_donor_that_cannot_be_read_behind_an_exact_prefix(served, monkeypatch):
    prompt = HEAD + DOCUMENT[:200] + text(10, 30) + DOCUMENT[200:] + QUESTION
    cold = served.cold(prompt)
    served.donate(HEAD + DOCUMENT + QUESTION)
    served.ask(HEAD + DOCUMENT[:200], "exact", max_tokens=1)
    monkeypatch.setattr(served.worker._donors, "get", _fails)
    answer = served.ask(prompt)
    answer.assert_like(cold)
    assert answer.shifted == 0
    assert answer.num_cached == answer.report["exact_tokens"] > 0, "vLLM's own hit"
    assert answer.report["miss"]["reason"] == "error"
    assert errors(served) == 1


def test_a_forward_pass_that_fails_is_left_to_vllm(served, monkeypatch):
    cold = served.cold(PROMPT)
    served.donate(HEAD + DOCUMENT + QUESTION)
    monkeypatch.setattr("kvgraft.integrations.vllm.worker.passes.AllLayersPass._run", _fails)
    before = len(served.scheduler.registry.catalogue)
    answer = served.ask(PROMPT)
    answer.assert_like(cold)
    assert answer.num_cached == 0
    assert answer.report["miss"]["reason"] == "error"
    monkeypatch.undo()
    served.llm.reset_prefix_cache()
    for donor in list(served.scheduler.registry.catalogue)[before:]:
        assert donor.start_position == 0, "what attended to garbage is no donor"
    again = served.ask(text(8, 77) + DOCUMENT[:300] + OTHER_QUESTION)
    assert again.shifted > 0


def test_a_policy_that_fails_behind_its_first_step_is_a_miss(served, monkeypatch):
    prompt = OTHER_HEAD + DOCUMENT[:300] + text(10, 60) + DOCUMENT[300:] + OTHER_QUESTION
    cold = served.cold(prompt)
    served.donate(HEAD + DOCUMENT + QUESTION)
    with monkeypatch.context() as patch:
        patch.setattr(served.worker, "_policy", FailsLater())
        answer = served.ask(prompt)
    answer.assert_like(cold)
    assert (answer.shifted, answer.report["recomputed_tokens"]) == (0, 0)
    assert answer.report["miss"]["reason"] == "policy_error"
    assert "no second step" in answer.report["miss"]["detail"]
    assert errors(served) == 1
    for donor in served.scheduler.registry.catalogue:
        assert len(served.worker._donors.later(donor.donor_id)().keys[0]) == donor.num_tokens, "captured once"


class Afresh(FailsLater):
    """Has some tokens computed first, and everything then."""

    def steps(self, context):
        yield Recompute(context.reused[:20])
        yield Recompute(context.reused[:0], afresh=True)


def test_a_step_afresh_is_a_full_prefill(served, monkeypatch):
    prompt = OTHER_HEAD + DOCUMENT[:300] + text(10, 60) + DOCUMENT[300:] + OTHER_QUESTION
    cold = served.cold(prompt)
    served.donate(HEAD + DOCUMENT + QUESTION)
    with monkeypatch.context() as patch:
        patch.setattr(served.worker, "_policy", Afresh())
        answer = served.ask(prompt)
    answer.assert_like(cold)
    assert answer.report["recomputed_tokens"] == len(DOCUMENT)
    assert errors(served) == 0


def test_a_lookup_that_raises_is_a_miss(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    cold = served.cold(PROMPT)
    monkeypatch.setattr(served.scheduler.registry.catalogue, "find", _fails)
    answer = served.ask(PROMPT)
    answer.assert_like(cold)
    assert answer.report["miss"]["reason"] == "error"
    assert errors(served) == 1


def test_a_lookup_that_would_pass_the_deadline_is_not_begun(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    lookup = served.scheduler._lookup
    monkeypatch.setattr(lookup, "_deadline_ms", 20.0)
    monkeypatch.setattr(lookup, "_clock", lambda: 0.0)
    lookup._recent_ms_per_token.extend([1.0] * 9)
    answer = served.ask(PROMPT)
    assert answer.shifted == 0
    assert answer.report["miss"]["reason"] == "deadline"
    for _ in range(60):  # experience fades, so that one slow moment does not end reuse
        served.llm.reset_prefix_cache()
        if served.ask(text(7, 60) + DOCUMENT, max_tokens=1).report["reused_tokens"]:
            break
    else:
        pytest.fail("reuse never came back")


def test_a_capture_that_fails_leaves_no_donor(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvgraft.integrations.vllm.worker.donor_store.DonorStore.capture", _fails)
        served.ask(HEAD + DOCUMENT + QUESTION, max_tokens=3)
    served.ask(text(3, 20), "off")
    assert errors(served) == 1
    assert len(served.scheduler.registry.catalogue) == 0
    assert served.worker._donors.used_bytes == 0
    served.llm.reset_prefix_cache()  # of sliding windows only what is computed can be captured
    served.donate(HEAD + DOCUMENT + QUESTION)
    assert served.ask(PROMPT).shifted > 0


def test_books_that_cannot_be_kept_cost_a_donor_and_nothing_else(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    grafted = served.ask(PROMPT)
    served.llm.reset_prefix_cache()
    for donor in list(served.scheduler.registry.catalogue)[1:]:
        served.scheduler.registry.forget(donor.donor_id)
    with monkeypatch.context() as patch:
        patch.setattr(served.scheduler._captures, "open_after_graft", _fails)
        served.ask(PROMPT).assert_like(grafted)
        patch.setattr(served.scheduler._captures, "_capture", _fails)
        served.ask(text(12, 300))
    assert errors(served) == 2
    assert len(served.scheduler.registry.catalogue) == 1


def test_a_worker_that_refuses_ends_reuse_and_nothing_else(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    cold = served.cold(PROMPT)
    monkeypatch.setattr(served.worker, "_refusal", "the layout is unknown")
    monkeypatch.setattr(served.scheduler, "_refusal", "")
    served.ask(text(3, 20), "off")
    answer = served.ask(PROMPT)
    answer.assert_like(cold)
    assert answer.report["miss"] == {"reason": "model_refused", "detail": "the layout is unknown"}


def test_hashes_of_another_form_are_a_miss(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    cold = served.cold(PROMPT)
    monkeypatch.setattr("kvgraft.integrations.vllm.scheduler.continuing.make_private", _fails)
    answer = served.ask(PROMPT)
    answer.assert_like(cold)
    assert answer.shifted == 0
    assert errors(served) == 1


def _fails(*args, **kwargs):
    raise RuntimeError("injected")
