"""K/V of 8 bits in a real vLLM: documents are moved, what is computed is vLLM's own, nothing approximate becomes exact."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engines import answer_of, engine, parameters, text
from kvgraft.graft.select import FirstK
from kvgraft.integrations.vllm.worker.float8_layer import TOLERANCE, rms_error
from kvgraft.integrations.vllm.worker.graft_job import GraftJob
from kvgraft.integrations.vllm.worker.host_reader import read_block
from kvgraft.integrations.vllm.worker.space import row_layout, space_of, weights_of

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
DONOR, PROMPT = HEAD + DOCUMENT + QUESTION, OTHER_HEAD + DOCUMENT + OTHER_QUESTION
SERVED = {
    "llama": ("llama", {}),
    "llama, e5m2": ("llama", {"kv_cache_dtype": "fp8_e5m2"}),
    "llama, bfloat16, blocks of 128": ("llama", {"dtype": "bfloat16", "block_size": 128}),
    "qwen3": ("qwen3", {"max_num_batched_tokens": 256}),
    "gemma3": ("gemma3", {"num_gpu_blocks_override": 500}),
}


@pytest.fixture(scope="module", params=list(SERVED))
def served(request, model_folder):
    family, changed = SERVED[request.param]
    engine_options = {"kv_cache_dtype": "fp8", "num_gpu_blocks_override": 200, **changed}
    with engine(model_folder, family, options={"min_saved_tokens": 0}, **engine_options) as one:
        one.ask(text(9, 20), "off", max_tokens=1)
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    yield
    served.check()


def test_a_moved_document_is_reused_in_a_byte_a_number(served):
    assert served.worker.refusal == ""
    served.donate(DONOR)
    answer = served.ask(PROMPT)
    assert answer.shifted >= len(DOCUMENT) * 0.6
    assert answer.report["miss"] is None
    per_token = sum(2 * layer.spec.num_kv_heads * layer.spec.head_size for layer in layers(served))
    held = sum(donor.num_tokens for donor in served.scheduler.registry.catalogue)
    assert served.worker._donors.used_bytes == held * per_token


def layers(served):
    return [layer for group in served.worker._groups for layer in group.layers]


@pytest.fixture
def made(monkeypatch):
    """K/V of every graft when it is made, from its first position after the exact prefix on."""
    made = []

    def finish_and_read(self, finish=GraftJob._finish):
        finish(self)
        made.append(read_block(self._homes, np.arange(self.command.plan.prefix_len, self.command.end)))

    monkeypatch.setattr(GraftJob, "_finish", finish_and_read)
    return made


def test_computing_every_reused_token_again_is_a_full_prefill_but_for_rounding(served, made, monkeypatch):
    if served.family == "gemma3":
        pytest.skip("layers with windows keep the last one alone")
    donate_alone(served)
    served.ask(PROMPT, repair="before", max_tokens=1)
    donate_alone(served)
    monkeypatch.setattr(served.worker, "_policy", FirstK(100_000))
    warm = served.ask(PROMPT, repair="before", max_tokens=1)
    assert warm.report["recomputed_tokens"] == len(DOCUMENT)
    served.forget_donors()
    served.donate(PROMPT)
    (donor,) = served.scheduler.registry.catalogue
    full = served.worker._donors.get(donor.donor_id, 0, made[0].num_tokens)
    repaired, computed = (errors(block, full) for block in made)
    limit = TOLERANCE[layers(served)[0].dtype]
    assert max(computed) < limit
    assert max(repaired) > 2 * limit, "this test could not tell a graft from a full prefill"


def donate_alone(served):
    """Nothing else is known then, what an earlier graft has computed least of all."""
    served.forget_donors()
    served.donate(DONOR)


def errors(block, full):
    """Of the keys and values of each layer."""
    pairs = zip((*block.keys, *block.values), (*full.keys, *full.values), strict=True)
    return [rms_error(*pair) for pair in pairs]


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_a_grafted_request_is_no_exact_prefix_of_anyone(served, mode):
    cold = served.cold(PROMPT)
    served.donate(DONOR)
    assert served.ask(PROMPT, max_tokens=70).shifted
    answer = served.ask(PROMPT, mode)
    assert answer.num_cached <= len(OTHER_HEAD)
    assert answer.report["shifted_tokens"] == 0
    assert answer.tokens == cold.tokens
    assert answer.logprobs == cold.logprobs


@pytest.mark.parametrize("preempt_after", [None, 9])
def test_two_of_one_step_answer_as_alone_and_a_preempted_one_is_no_nearer_to_a_full_prefill(served, preempt_after):
    other = text(6, 70) + DOCUMENT[100:600] + text(7, 30)
    alone = []
    for prompt in (PROMPT, other):
        donate_alone(served)
        alone.append(served.ask(prompt, max_tokens=20))
    donate_alone(served)
    core, scheduler, ended, steps = served.llm.llm_engine, served.vllm_scheduler, {}, 0
    for name, prompt in (("one", PROMPT), ("other", other)):
        core.add_request(name, {"prompt_token_ids": prompt}, parameters(None, 20))
    while core.has_unfinished_requests():
        ended |= {output.request_id: answer_of(output) for output in core.step() if output.finished}
        steps += 1
        if steps == preempt_after and len(scheduler.running) == 2:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
    for mine, theirs in zip((ended["one"], ended["other"]), alone, strict=True):
        if preempt_after is None:
            assert mine.report["shifted_tokens"] == theirs.report["shifted_tokens"]
            mine.assert_like(theirs, tolerance=0.1)
        assert mine.report["spans"]
    exact = served.ask(PROMPT, "exact", max_tokens=20)
    assert exact.num_cached <= len(OTHER_HEAD)


def test_turns_go_on_from_a_graft(served):
    served.donate(DONOR)
    first = served.ask(PROMPT, max_tokens=8)
    if served.family == "gemma3":
        pytest.skip("windows keep no blocks to go on from")
    following = PROMPT + list(first.tokens) + text(8, 60)
    second = served.ask(following)
    assert second.report["continued_tokens"] > len(OTHER_HEAD)
    assert second.report["computed_tokens"] < 200


def test_donors_of_other_scales_or_another_type_are_not_taken(served):
    rank = served.worker._rank
    layout, weights = row_layout(rank), weights_of(rank)
    assert {field.dtype for field in layout.fields} == {layers(served)[0].dtype}
    module = layers(served)[1].module
    module._k_scale.fill_(0.5)
    module._k_scale_float = 0.5
    try:
        changed = weights_of(rank)
        names = [space_of(rank, layout, [digest], 0) for digest in (weights, changed)]
        assert all(one != other for one, other in pairwise(names))
        served.donate(DONOR)  # the change is noticed while it is read: nothing of it stays
        assert not served.ask(PROMPT, max_tokens=1).shifted
    finally:
        module._k_scale.fill_(1.0)
        module._k_scale_float = 1.0
        assert served.llm.reset_prefix_cache(reset_connector=True)
        served.ask(text(9, 20), "off", max_tokens=1)
