"""The small twin (`examples/graft_in_500_lines.py`) plans and answers as the embedded engine does, prompt after prompt."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from tests.docs.code_index import ROOT
from transformers import AutoModelForCausalLM

from kvgraft import LLM, SamplingParams
from kvgraft.models import bundled_model_path
from kvgraft.types import CONTINUATION, Fidelity

POLICY = {"selection": "first_k", "correction": "none", "repair": "before"}


@pytest.fixture(scope="module")
def twin():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        graft_in_500_lines = importlib.import_module("graft_in_500_lines")
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32).eval()
    return graft_in_500_lines.Reader(model)


@pytest.fixture(scope="module")
def llm():
    llm = LLM("graft-tiny", heal="off", **POLICY)
    yield llm
    llm.close()


def prompts():
    """A system prompt, three documents, and ten prompts of these and of new text; two go on from what others have had."""
    rng = np.random.default_rng(0)
    new = lambda count: rng.integers(3, 4000, count).tolist()  # noqa: E731
    one, two, three, system = new(120), new(200), new(90), new(40)
    asked = [
        system + one + new(10),
        new(7) + two + new(5),
        new(3) + three + new(9),
        system + two + new(20),
        system + one + two + new(4),
        three + one + new(12),
        new(50) + two[30:120] + new(8) + three[20:70] + new(3),
        system + three + two[:60] + one[50:] + new(16),
    ]
    return [*asked, system + one + two + new(40), asked[-1] + new(30)]


def copied(report):
    """`(target, length, source)` of what was copied from other places."""
    spans = [span for span in report.spans if span.fidelity is Fidelity.SHIFTED]
    return [(span.target_start, span.length, span.target_start - span.position_delta) for span in spans]


def test_ten_prompts_are_planned_and_answered_alike(twin, llm):
    seen = set()
    for prompt in prompts():
        score = llm.score(np.array(prompt), [5], **POLICY)
        (answer,) = llm.generate([np.array(prompt)], SamplingParams(1), **POLICY)
        own, report = twin.read(prompt), answer.report
        assert [(run.target, run.length, run.source) for run in own.runs] == copied(report)
        assert (own.exact_len, own.continued_len) == (report.exact_tokens, report.continued_tokens)
        assert len(own.rows) == report.computed_tokens
        np.testing.assert_allclose(own.logits.numpy(), score.logits[0], atol=1e-4)
        seen |= {span.fidelity for span in report.spans} | {span.donor_id == CONTINUATION for span in report.spans}
    assert seen >= {Fidelity.SHIFTED, Fidelity.CONTINUED, True, False}


def test_what_is_exact_is_the_models_own_forward_pass(twin):
    tokens = np.random.default_rng(1).integers(3, 4000, 150).tolist()
    with torch.no_grad():
        full = twin.model(torch.tensor([tokens])).logits[0, -1]
    for num_rows in (150, 1):  # computed, then found but for the last token
        answer = twin.read(tokens)
        assert len(answer.rows) == num_rows
        torch.testing.assert_close(answer.logits, full, atol=1e-4, rtol=0)
