"""A first token of which the model is not sure waits for the repair, which is made with the graft."""

from __future__ import annotations

import pytest
from test_repair_after import IN_GAPS, LAST_IN_A_BLOCK, LONG, NO_GAPS, assert_alike, run

from engines import engine, text

UNSURE = {
    "sync": {},
    "async": {"load": "async"},
    "chunks": {"max_num_batched_tokens": 32},
    "asynchronous scheduling": {"async_scheduling": True},
}


@pytest.fixture(scope="module", params=UNSURE)
def unsure(request, model_folder):
    """An engine in which every first token waits."""
    options = {"min_saved_tokens": 0, "max_generation": 0, "repair_below_margin": 1}
    engine_options = dict(UNSURE[request.param])
    options |= {"load": engine_options.pop("load")} if "load" in engine_options else {}
    with engine(model_folder, "llama", options=options, num_gpu_blocks_override=500, **engine_options) as one:
        one.ask(text(9, 20), "off", max_tokens=1)
        yield one


@pytest.mark.parametrize("prompt", [IN_GAPS, NO_GAPS, LAST_IN_A_BLOCK])
def test_an_unsure_first_token_is_drawn_from_what_is_repaired(unsure, prompt):
    before = run(unsure, prompt, "before", max_tokens=5)
    after = run(unsure, prompt, "after", max_tokens=5)
    assert after.tokens == before.tokens
    assert_alike(after, before, first=1)
    repair = after.report["repair"]
    assert (repair["time"], repair["from_token"]) == ("before", 1)
    assert repair["reason"].startswith("the first token was likelier than the next one by 0.")
    for name in ("shifted_tokens", "recomputed_runs", "corrected_tokens", "computed_tokens"):
        assert after.report[name] == before.report[name], name
    assert after.report["recomputed_tokens"] > 0
    unsure.ask(text(9, 20), "off", max_tokens=1)
    assert not unsure.worker._unrepaired
    assert not unsure.scheduler.counts.num_errors
    unsure.check()


def test_an_unsure_first_token_after_a_long_text_does_not_wait(unsure):
    """vLLM computes that text: workers do not see how sure the token is."""
    assert run(unsure, LONG, "after").report["repair"]["time"] == "after"
