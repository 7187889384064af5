"""Whatever makes K/V stale makes donors go: resets, sleep, pauses, and weights that change without a word."""

from __future__ import annotations

import pytest
import torch

from engines import answer_of, engine, parameters, text

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
DONOR, PROMPT = HEAD + DOCUMENT + QUESTION, OTHER_HEAD + DOCUMENT + OTHER_QUESTION


@pytest.fixture(scope="module", params=["sync", "async"])
def served(request, model_folder):
    """Grafts in pieces of 40 rows, prompts in chunks of 256 tokens."""
    options = {"selection": "none", "load": request.param, "max_recompute_tokens_per_step": 40}
    with engine(model_folder, "llama", options=options, max_num_batched_tokens=256) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    model = served.worker._handle.model
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data.copy_(kept[name])
    if served.vllm_scheduler.pause_state:
        served.llm.llm_engine.engine_core.engine_core.resume_scheduler()
    assert served.llm.reset_prefix_cache(reset_connector=True)
    served.check()


@pytest.fixture(autouse=True, scope="module")
def warm(served):
    """The model is known only behind the first forward pass."""
    served.ask(text(9, 20), "off", max_tokens=1)


def train(served):
    """Change the weights of every rank in place, as an update from a trainer does."""

    def step(worker):
        generator = torch.Generator().manual_seed(1)
        for parameter in worker.model_runner.model.parameters():
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.data.mul_(1 + 0.3 * (noise - 0.5))

    served.llm.collective_rpc(step)


def add(served, request_id, prompt, max_tokens=4):
    served.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, parameters(None, max_tokens))


def finish(served):
    outputs = {}
    while served.llm.llm_engine.has_unfinished_requests():
        for output in served.llm.llm_engine.step():
            outputs[output.request_id] = output
    return {name: answer_of(output) for name, output in outputs.items()}


def test_nothing_of_the_old_model_is_grafted_behind_a_reset(served):
    served.donate(DONOR)
    old = served.ask(PROMPT)
    assert old.shifted == len(DOCUMENT)
    train(served)
    assert served.llm.reset_prefix_cache(reset_connector=True)
    assert len(served.scheduler.registry.catalogue) == 0
    cold = served.cold(PROMPT)
    assert served.worker._donors.used_bytes == 0, "workers forget in front of the next step"
    assert cold.tokens != old.tokens
    answer = served.ask(PROMPT)
    assert answer.shifted == 0
    answer.assert_like(cold)
    served.llm.reset_prefix_cache()
    again = served.ask(HEAD + DOCUMENT + text(31, 40))
    assert again.shifted == len(DOCUMENT), "the new model's text is reused as the old one's was"


def test_weights_that_change_without_a_word_are_noticed(served):
    """vLLM tells no connector of `update_weights`, `reload_weights` or a `collective_rpc` that writes parameters."""
    served.donate(DONOR)
    train(served)
    served.llm.reset_prefix_cache()  # the operator forgot the connector
    grafted = served.ask(PROMPT)
    assert grafted.shifted == 0
    assert served.worker._donors.used_bytes < 2 * len(PROMPT) * 2 * 2 * 32 * 4 * 4
    served.llm.reset_prefix_cache()
    grafted.assert_like(served.cold(PROMPT))
    assert served.ask(HEAD + DOCUMENT + OTHER_QUESTION).shifted in (0, len(DOCUMENT)), "if any, the new model's"


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_forgets(served, level):
    served.donate(DONOR)
    core = served.llm.llm_engine.engine_core.engine_core
    core.sleep(level)
    train(served)
    core.wake_up()
    core.resume_scheduler()
    assert len(served.scheduler.registry.catalogue) == 0
    answer = served.ask(PROMPT)
    assert answer.shifted == 0
    answer.assert_like(served.cold(PROMPT))


@pytest.mark.parametrize("clear", [True, False])
def test_a_pause_forgets_if_it_clears_caches(served, clear):
    served.donate(DONOR)
    core = served.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=clear)
    core.resume_scheduler()
    served.llm.reset_prefix_cache()
    assert served.ask(PROMPT).shifted == (0 if clear else len(DOCUMENT))


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_graft_under_way_is_given_up(served, steps):
    """Its request is computed; what it was made of belongs to a model that may be gone."""
    served.donate(DONOR)
    prompt = OTHER_HEAD + DOCUMENT[:300] + text(7, 90) + DOCUMENT[300:] + OTHER_QUESTION
    add(served, "grafted", prompt, max_tokens=20)
    for _ in range(steps):
        served.llm.llm_engine.step()
    waits = any(state.attempt.is_copying for state in served.scheduler._attempts.running.values())
    errors = served.scheduler.counts.num_errors
    served.vllm_scheduler.reset_prefix_cache(reset_connector=True)
    answer = finish(served)["grafted"]
    if waits:
        assert answer.shifted == 0
        assert answer.report["miss"]["reason"] == "no_donors"
        assert served.scheduler.counts.num_errors == errors, "the operator asked for it"
        answer.assert_like(served.cold(prompt, max_tokens=20))
        (donor,) = served.scheduler.registry.catalogue
        assert donor.num_tokens >= len(prompt), "vLLM computed all of it again"
    else:
        assert len(served.scheduler.registry.catalogue) == 0, "what it computed belongs to both models"
        assert served.worker._donors.used_bytes == 0


@pytest.mark.parametrize("steps", range(1, 6))
def test_weights_that_change_under_a_graft_are_noticed(served, steps):
    """A graft in pieces goes on in steps that bring no command: what it copies must still be of the model that runs."""
    served.donate(DONOR)
    prompt = OTHER_HEAD + DOCUMENT[:300] + text(7, 90) + DOCUMENT[300:] + OTHER_QUESTION
    add(served, "grafted", prompt, max_tokens=20)
    for _ in range(steps):
        served.llm.llm_engine.step()
    waits = any(state.attempt.is_copying for state in served.scheduler._attempts.running.values())
    train(served)
    answer = finish(served)["grafted"]
    served.ask(text(8, 20), "off", max_tokens=1)  # a further step brings what was decided behind the last
    assert served.worker._donors.text_ids == frozenset(), "what is to be no donor is not kept"
    if waits:
        assert answer.shifted == 0
        answer.assert_like(served.cold(prompt, max_tokens=20))


@pytest.mark.parametrize("preempt", [False, True])
def test_text_that_is_being_captured_becomes_no_donor(served, preempt):
    """Unless vLLM takes the blocks away and computes it again."""
    add(served, "computed", DONOR)
    served.llm.llm_engine.step()
    served.llm.llm_engine.step()
    served.vllm_scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)
    finish(served)
    assert len(served.scheduler.registry.catalogue) == int(preempt)


def test_a_claim_that_waits_for_room_is_looked_up_anew(served):
    served.donate(DONOR)
    scheduler = served.vllm_scheduler
    add(served, "waits", PROMPT)
    request = next(iter(scheduler.requests.values()))
    assert served.scheduler.match(request, 0)[0] == len(OTHER_HEAD) + len(DOCUMENT)
    assert served.llm.reset_prefix_cache(reset_connector=True)
    assert served.scheduler.match(request, 0) == (0, False)
    answer = finish(served)["waits"]
    assert answer.shifted == 0
    assert answer.report["miss"]["reason"] == "no_donors"
