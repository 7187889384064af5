"""What a policy chooses is computed with the second token: K/V from then on, reports, and what may come between."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from policies import FailsLater

from engines import BLOCK, Answer, answer_of, engine, parameters, text
from kvgraft.graft.select import NoRecompute
from kvgraft.integrations.vllm.runner import takes_running_back
from kvgraft.integrations.vllm.worker.graft_worker import GraftWorker
from kvgraft.integrations.vllm.worker.group_kv import PagedKV
from kvgraft.integrations.vllm.worker.host_reader import read_block
from kvgraft.integrations.vllm.worker.passes import GraftPass

FORCED = 9
DOCUMENTS = [text(40, 300), text(41, 170), text(42, 220)]
HEADS = [text(50, 33), text(51, 64), text(52, 1)]
DONORS = [head + document for head, document in zip(HEADS, DOCUMENTS, strict=True)]
FRONT, BETWEEN, QUESTION = text(60, 45), text(61, 15), text(62, 40)
IN_GAPS = FRONT + DOCUMENTS[1] + BETWEEN + DOCUMENTS[0] + BETWEEN[:7] + DOCUMENTS[2] + QUESTION
"""After its first reused token no more than 64 are computed anyway: all of them are the query."""
NO_GAPS = DOCUMENTS[2] + DOCUMENTS[0] + QUESTION
LAST_IN_A_BLOCK = NO_GAPS + text(63, (1 - len(NO_GAPS)) % BLOCK)
LONG = NO_GAPS + text(64, 260)
"""Its end is computed by vLLM."""
SERVED = {
    "query_seam": ("llama", {}, {}),
    "query_seam, async": ("qwen3", {"load": "async"}, {}),
    "query_seam, chunks": ("llama", {}, {"max_num_batched_tokens": 32}),
    "first_k": ("llama", {"selection": "first_k"}, {}),
    "kv_deviation": ("llama", {"selection": "kv_deviation"}, {}),
    "gemma3": ("gemma3", {}, {}),
}


@pytest.fixture(scope="module", params=[name for name in SERVED if name != "gemma3"])
def served(request, model_folder):
    family, options, engine_options = SERVED[request.param]
    # What a graft computes is nobody's donor: a prompt that is asked twice finds the same ones.
    options = {"min_saved_tokens": 0, "max_generation": 0, **options}
    with engine(model_folder, family, options=options, num_gpu_blocks_override=500, **engine_options) as one:
        one.ask(text(9, 20), "off", max_tokens=1)  # the model is known after its first forward pass
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    know_the_documents(served)
    served.scheduler.counts.num_errors = 0
    yield
    served.ask(text(9, 20), "off", max_tokens=1)
    assert not served.worker._unrepaired
    served.check()


def know_the_documents(served):
    served.forget_donors()
    served.donate(*DONORS)


def run(served, prompt, repair=None, *, max_tokens=6, forced=None, stop=(), between=lambda drawn: None):
    """Answer one prompt; `between` is called after each step with the number of tokens drawn."""
    know_the_documents(served)
    asked = parameters(None, max_tokens, repair, forced=forced)
    asked.stop_token_ids = list(stop)
    served.llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, asked)
    finished = None
    while served.llm.llm_engine.has_unfinished_requests():
        for output in served.llm.llm_engine.step():
            finished = output if output.finished else finished
        for request in list(served.vllm_scheduler.requests.values()):
            between(request.num_output_tokens)
    return None if finished is None else answer_of(finished)


def own_kv(served, num_tokens):
    """The K/V of the one request that runs."""
    (request,) = served.vllm_scheduler.requests.values()
    blocks = served.vllm_scheduler.kv_cache_manager.get_block_ids(request.request_id)
    homes = [
        PagedKV.of(group, np.asarray(ids, np.int32), start=0)
        for group, ids in zip(served.worker._groups, blocks, strict=True)
    ]
    return read_block(homes, np.arange(num_tokens))


def kv_of_answer(served, prompt, repair, *, num_drawn=2):
    """The answer with forced tokens, and the prompt's K/V once `num_drawn` of them are drawn."""
    kept = {}
    answer = run(
        served,
        prompt,
        repair,
        forced=FORCED,
        between=lambda drawn: kept.setdefault(drawn, own_kv(served, len(prompt)) if drawn == num_drawn else None),
    )
    return answer, kept[num_drawn]


def exact_answer(served, prompt):
    """The same of a full prefill."""
    served.forget_donors()
    kept = {}
    asked = parameters("off", 6, forced=FORCED)
    served.llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, asked)
    while served.llm.llm_engine.has_unfinished_requests():
        outputs = served.llm.llm_engine.step()
        for request in list(served.vllm_scheduler.requests.values()):
            if request.num_output_tokens == 2:
                kept[2] = own_kv(served, len(prompt))
    return answer_of(outputs[0]), kept[2]


def distance(mine, theirs):
    return max(
        float((here - there).abs().max())
        for here, there in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True)
    )


def assert_alike(mine: Answer, theirs: Answer, *, first):
    """The same probabilities of what both list, from token `first` on."""
    assert len(mine.logprobs) == len(theirs.logprobs)
    for here, there in zip(mine.logprobs[first - 1 :], theirs.logprobs[first - 1 :], strict=True):
        assert len(here.keys() & there.keys()) >= 4
        for token in here.keys() & there.keys():
            assert here[token] == pytest.approx(there[token], abs=1e-3)


@pytest.mark.parametrize(
    "prompt",
    [IN_GAPS, NO_GAPS, LAST_IN_A_BLOCK],
    ids=["query in gaps", "no gaps", "last token in a block of its own"],
)
def test_from_the_second_token_on_kv_are_those_of_a_repair_before_the_first(served, prompt):
    before, kv_before = kv_of_answer(served, prompt, "before")
    after, kv_after = kv_of_answer(served, prompt, "after")
    _, kv_unrepaired = kv_of_answer(served, prompt, "after", num_drawn=1)
    assert distance(kv_after, kv_before) < 1e-4
    assert distance(kv_unrepaired, kv_before) > 1e-2, "this test could not fail"
    assert_alike(after, before, first=2)
    assert (before.report["repair"]["time"], before.report["repair"]["from_token"]) == ("before", 1)
    assert (after.report["repair"]["time"], after.report["repair"]["from_token"]) == ("after", 2)
    assert after.report["repair"]["reason"] is before.report["repair"]["reason"] is None
    same = ("shifted_tokens", "recomputed_tokens", "recomputed_runs", "corrected_tokens", "computed_tokens")
    for name in same:
        assert after.report[name] == before.report[name], name
    assert after.report["recomputed_tokens"] > 0


@pytest.mark.parametrize("served", [name for name in SERVED if name.startswith("query_seam")], indirect=True)
def test_a_long_text_after_the_last_span_is_looked_at_by_the_repair(served):
    _, kv_before = kv_of_answer(served, LONG, "before")
    after, kv_after = kv_of_answer(served, LONG, "after")
    assert distance(kv_after, kv_before) < 1e-4
    assert (after.report["repair"]["time"], after.report["repair"]["from_token"]) == ("after", 2)


def test_the_first_token_is_that_of_nothing_recomputed(served, monkeypatch):
    after = run(served, IN_GAPS, forced=FORCED)
    before = run(served, IN_GAPS, "before", forced=FORCED)
    monkeypatch.setattr(served.worker, "_policy", NoRecompute())
    none = run(served, IN_GAPS, "before", forced=FORCED)
    assert none.report["recomputed_tokens"] == 0
    first, reference, repaired = (answer.logprobs[0] for answer in (after, none, before))
    assert all(reference[token] == pytest.approx(first[token], abs=1e-4) for token in reference)
    assert any(abs(repaired.get(token, 0.0) - logprob) > 1e-3 for token, logprob in first.items())


@pytest.fixture
def repairs(served, monkeypatch):
    """Computed and drawn tokens of each request that is repaired."""
    seen = []

    def note(self, command, repair=GraftWorker._repair):
        request = served.vllm_scheduler.requests[command.request_id]
        seen.append(
            (request.num_computed_tokens, request.num_output_tokens)
        )  # a step's rows count when it is scheduled
        return repair(self, command)

    monkeypatch.setattr(GraftWorker, "_repair", note)
    return seen


@pytest.mark.parametrize("tail", [40, 300])
def test_it_comes_once_and_with_the_second_token(served, repairs, tail):
    """Of a prompt that vLLM computes in chunks after the graft, too."""
    prompt = NO_GAPS + text(63, tail)
    answer = run(served, prompt)
    assert repairs == [(len(prompt) + 1, 1)]
    assert answer.report["repair"]["from_token"] == 2


def test_an_answer_of_one_token_waits_for_it(served, repairs):
    short = run(served, IN_GAPS, max_tokens=1, forced=FORCED)
    before = run(served, IN_GAPS, "before", forced=FORCED)
    assert not repairs
    assert short.report["repair"]["reason"] == "one token was asked for"
    assert (short.report["repair"]["time"], short.report["repair"]["from_token"]) == ("before", 1)
    assert short.report["recomputed_tokens"] == before.report["recomputed_tokens"] > 0
    assert short.logprobs[0] == pytest.approx(before.logprobs[0], abs=1e-4)


def test_an_answer_of_two_tokens_is_told_whole(served):
    longer, shorter = run(served, IN_GAPS), run(served, IN_GAPS, max_tokens=2)
    for name in ("shifted_tokens", "recomputed_tokens", "corrected_tokens", "repair"):
        assert shorter.report[name] == longer.report[name], name


def test_an_answer_that_ends_with_its_first_token_is_not_repaired(served, repairs):
    answer = run(served, IN_GAPS, forced=FORCED, stop=[FORCED])
    assert len(answer.tokens) == 1
    assert not repairs
    assert (answer.report["repair"]["time"], answer.report["repair"]["from_token"]) == ("after", None)
    assert (answer.report["recomputed_tokens"], answer.report["corrected_tokens"]) == (0, 0)


def test_a_request_that_is_aborted_after_its_first_token_is_not_repaired(served, repairs):
    def abort(drawn):
        if drawn == 1:
            served.llm.llm_engine.abort_request(["one"])

    run(served, IN_GAPS, between=abort)
    assert not repairs


def preempt_next(served):
    """Let vLLM find no block for what runs in its next step."""
    manager = served.vllm_scheduler.kv_cache_manager

    def refuse(*args, **kwargs):
        del manager.allocate_slots

    manager.allocate_slots = refuse


@pytest.mark.parametrize("preempt_at", [(0,), (1,), (2,), (4,), (1, 3)], ids=str)
def test_a_preempted_request_answers_as_if_it_had_not_been(served, preempt_at):
    """Whenever it is preempted, its first token is of nothing recomputed and the others of repaired K/V."""
    expected = run(served, IN_GAPS)
    waiting = list(preempt_at)

    def preempt(drawn):
        if waiting and drawn == waiting[0] and served.vllm_scheduler.running:
            waiting.pop(0)
            preempt_next(served)

    answer = run(served, IN_GAPS, between=preempt)
    assert not waiting or preempt_at == (0,), "only prompts in chunks have a step without a token"
    assert_alike(answer, expected, first=1)
    assert answer.tokens == expected.tokens
    assert (answer.report["repair"]["time"], answer.report["repair"]["from_token"]) == ("after", 2)
    assert answer.report["shifted_tokens"] >= expected.report["shifted_tokens"]


def test_an_answer_is_the_same_alone_and_beside_others(served):
    alone = run(served, IN_GAPS)
    know_the_documents(served)
    others = [text(80 + number, 30) + DOCUMENTS[number % 3] + text(90 + number, 25) for number in range(8)]
    answers = served.ask_many([*others[:4], IN_GAPS, *others[4:]], [None] * 9)
    assert answers[4].tokens == alone.tokens
    assert_alike(answers[4], alone, first=1)
    assert {answer.report["repair"]["from_token"] for answer in answers} == {2}


def test_nothing_is_repaired_after_a_reset(served, repairs):
    def reset(drawn):
        if drawn == 1:
            served.vllm_scheduler.reset_prefix_cache(reset_connector=True)

    answer = run(served, IN_GAPS, between=reset)
    assert not repairs
    assert answer.report["repair"]["reason"] == "donors were forgotten before the second token"
    assert (answer.report["repair"]["from_token"], answer.report["recomputed_tokens"]) == (None, 0)


def test_nothing_is_repaired_with_other_weights(served):
    """Weights change in place between the two tokens, and nobody tells."""
    parameters = list(served.worker._handle.model.parameters())
    kept, kv = [parameter.detach().clone() for parameter in parameters], []

    def train(drawn):
        if drawn == 1:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(1.1)
        if drawn in (1, 2):
            kv.append(own_kv(served, len(IN_GAPS)))

    answer = run(served, IN_GAPS, between=train)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    served.llm.reset_prefix_cache(reset_connector=True)
    assert distance(*kv) == 0.0
    assert "weights" in answer.report["repair"]["reason"]
    assert answer.report["repair"]["from_token"] is None


@pytest.fixture
def broken(monkeypatch):
    """How many passes of a repair, looks aside, are still to fail once they have written what they computed."""
    state = SimpleNamespace(num_left=0, is_repairing=False)

    def advance_and_fail(self, max_rows, advance=GraftPass.advance):
        rows = advance(self, max_rows)
        if state.is_repairing and state.num_left and getattr(self, "_look", None) is None:
            state.num_left -= 1
            raise MemoryError("injected")
        return rows

    def repair(self, command, repair=GraftWorker._repair):
        state.is_repairing = True
        num_rows = repair(self, command)
        state.is_repairing = False
        return num_rows

    monkeypatch.setattr(GraftPass, "advance", advance_and_fail)
    monkeypatch.setattr(GraftWorker, "_repair", repair)
    return state


@pytest.mark.parametrize("num_failures", [1, 2], ids=["everything-is-computed", "vllm-computes"])
def test_a_repair_that_fails_leaves_nothing_approximate(served, broken, num_failures):
    if num_failures == 2 and not takes_running_back(served.vllm_scheduler.vllm_config):
        pytest.skip("Model Runner V2 takes nothing back: test_runner_v2.py")
    exact, exact_kv = exact_answer(served, IN_GAPS)
    broken.num_left = num_failures
    answer, kv = kv_of_answer(served, IN_GAPS, "after")
    assert broken.num_left == 0
    assert distance(kv, exact_kv) < 1e-4
    assert_alike(answer, exact, first=2)
    repair = answer.report["repair"]
    assert "injected" in repair["reason"]
    assert (repair["from_token"], repair["exact_from_token"]) == (2, 2)
    assert answer.report["shifted_tokens"] > 400, "the first token was drawn from it"
    assert served.scheduler.counts.num_errors == 1


def test_a_graft_that_fails_leaves_nothing_to_repair(served, repairs, monkeypatch):
    """Workers would keep its donors' K/V for good: nobody asks for the repair of a graft that was not made."""
    cold = exact_answer(served, IN_GAPS)[0]
    with monkeypatch.context() as patch:
        patch.setattr(GraftPass, "advance", lambda *_: 1 / 0)
        answer = run(served, IN_GAPS, forced=FORCED)
    assert_alike(answer, cold, first=1)
    assert answer.report["miss"]["reason"] == "error"
    assert not repairs
    assert not served.worker._unrepaired


def test_a_policy_that_fails_in_a_repair_leaves_nothing_approximate(served, monkeypatch):
    exact, exact_kv = exact_answer(served, IN_GAPS)
    monkeypatch.setattr(served.worker, "_policy", FailsLater())
    answer, kv = kv_of_answer(served, IN_GAPS, "after")
    assert distance(kv, exact_kv) < 1e-4
    assert_alike(answer, exact, first=2)
    assert "no second step" in answer.report["repair"]["reason"]
    assert answer.report["repair"]["exact_from_token"] == 2
    assert served.scheduler.counts.num_errors == 1


def test_donors_are_made_of_what_was_repaired(served, monkeypatch):
    monkeypatch.setattr(served.scheduler.registry.rules, "_max_generation", 2)
    kept = {}
    run(served, NO_GAPS, between=lambda drawn: drawn and kept.setdefault(drawn, own_kv(served, len(NO_GAPS))))
    start = len(NO_GAPS) - len(QUESTION)
    (donor,) = (one for one in served.scheduler.registry.catalogue if one.start_position == start)
    assert donor.generation == 1
    made = served.worker._donors.get(donor.donor_id, 0, donor.num_tokens)
    assert distance(made, kept[2].span(start, len(QUESTION))) == 0.0
    assert distance(made, kept[1].span(start, len(QUESTION))) > 1e-2


@pytest.mark.parametrize("served", ["gemma3"], indirect=True)
def test_models_with_sliding_windows_are_repaired_before_the_first_token(served, repairs):
    answer = run(served, IN_GAPS)
    assert not repairs
    assert answer.report["repair"]["reason"] == "vLLM has given blocks of sliding windows back by then"
    assert (answer.report["repair"]["time"], answer.report["repair"]["from_token"]) == ("before", 1)
    assert answer.report["recomputed_tokens"] > 0
