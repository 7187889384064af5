"""Drift correction in vLLM moves what it moves in the embedded engine, once, and nothing that is somebody else's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import save_tiny
from tests.support.kept_kv import own_kv

from engines import BLOCK, answer_of, engine, parameters, text
from kvgraft.engine import LLM, SamplingParams
from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.drift_estimate import KernelRidge, MeanShift
from kvgraft.graft.rope import RopeShift, rotate_keys
from kvgraft.graft.sparse_prefill import SparsePrefill
from kvgraft.graft.steps import QUERY_ROWS
from kvgraft.integrations.vllm.worker.graft_job import GraftJob
from kvgraft.integrations.vllm.worker.group_kv import GroupKV
from kvgraft.integrations.vllm.worker.host_reader import read_block

DOCUMENTS = [text(40, 300), text(41, 170), text(42, 220)]
HEADS = [text(50, 33), text(51, 64), text(52, 1)]
FRONT, BETWEEN, QUESTION, LONG_QUESTION = text(60, 45), text(61, 30), text(62, 20), text(63, 150)
DONORS = [head + document for head, document in zip(HEADS, DOCUMENTS, strict=True)]
PROMPT = FRONT + DOCUMENTS[1] + BETWEEN + DOCUMENTS[0] + BETWEEN[:7] + DOCUMENTS[2] + QUESTION
KNOWN = text(64, 700)
"""Donor and beginning of a prompt alike: its K/V are exact where they are grafted."""

RANDOM = {"selection": "random", "recompute_ratio": 0.2}
IN_PIECES = {"load": "async", "max_recompute_tokens_per_step": 50}
SERVED = {
    "llama": ("llama", {}, {}),
    "llama in pieces": ("llama", IN_PIECES, {"max_num_batched_tokens": 128}),
    "llama at random": ("llama", RANDOM, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma3": ("gemma3", {}, {}),
    # A ring of 384 tokens, so that runs are longer than what lies in it together.
    "gemma3 in pieces": ("gemma3", {**RANDOM, "max_recompute_tokens_per_step": 200}, {}),
}


@pytest.fixture(scope="module", params=list(SERVED))
def served(request, model_folder):
    family, options, engine_options = SERVED[request.param]
    # What a graft computes is nobody's donor; when it is made, all of it is.
    options = {"min_saved_tokens": 0, "max_generation": 0, "repair": "before", **options}
    with engine(model_folder, family, options=options, num_gpu_blocks_override=500, **engine_options) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    served.scheduler.counts.num_errors = 0
    yield
    served.check()


@pytest.fixture
def made(monkeypatch):
    """The positions and K/V of every graft when it is made."""
    made = []

    def finish_and_read(self, finish=GraftJob._finish):
        finish(self)
        positions = np.arange(self.command.plan.prefix_len, self.command.end)
        made.append((positions, read_block(self._homes, positions)))

    monkeypatch.setattr(GraftJob, "_finish", finish_and_read)
    return made


@pytest.fixture
def slots(monkeypatch):
    """The slots of every prompt of the embedded engine when it is computed, in layers of either kind."""
    slots = []

    def receive_and_note(self, output, receive=SparsePrefill.receive):
        outcome, windows = receive(self, output), self._passes._swa_indices
        if outcome is not None:
            slots.append((self._passes._kv_indices.copy(), None if windows is None else windows.copy()))
        return outcome

    monkeypatch.setattr(SparsePrefill, "receive", receive_and_note)
    return slots


@pytest.mark.parametrize("served", [name for name in SERVED if name != "gemma3 in pieces"], indirect=True)
def test_corrects_what_the_embedded_engine_corrects(served, model_folder, made, slots, monkeypatch):
    # All runs: of one that is left alone, windows have no K/V where no later row looks back to.
    monkeypatch.setattr(KernelRidge, "least_sample", 1)
    config = served.worker._config
    reference = LLM(
        save_tiny(served.family, model_folder),
        selection=config.selection,
        recompute_ratio=config.recompute_ratio,
        num_slots=4096,
        dtype="float32",
    )
    served.donate(*DONORS)
    for donor in DONORS:
        reference.generate(donor, SamplingParams(1))
    slots.clear()
    report = served.ask(PROMPT).report
    expected = reference.score(PROMPT, [0]).report
    assert report["corrected_tokens"] == expected.corrected_tokens == report["shifted_tokens"] > 400
    ((positions, kv),) = made
    ((kv_indices, swa_indices),) = slots
    place = reference.engine.adapter.pool.place(
        kv_indices[positions], None if swa_indices is None else swa_indices[positions]
    )
    for layer, mine in enumerate(zip(kv.keys, kv.values, strict=True)):
        for here, there in zip(mine, place.read(layer), strict=True):
            torch.testing.assert_close(here, there, atol=1e-4, rtol=0)


@pytest.fixture
def drifting(served, monkeypatch):
    """What is reused of `KNOWN` is moved by one shift per layer, but for the first, and moved back by what is sampled."""
    moved, inject = [], GroupKV._inject

    def inject_and_move(self, spans, start, stop):
        inject(self, spans, start, stop)
        rotated = spans.between(start, stop)
        for number, layer in zip(self.layers, self.group.layers, strict=True):
            if rotated is not None and ".layers.0." not in layer.name:
                move(self.place(rotated.positions), number, rotated.positions, served.worker._rank.rope[number])
                moved.append(layer.name)

    monkeypatch.setattr(GroupKV, "_inject", inject_and_move)
    monkeypatch.setattr(served.worker, "_correction", DriftCorrection(MeanShift(shrink=False)))
    return moved


def move(place, number, positions, rope):
    keys, values = place.read(number)
    generator = torch.Generator().manual_seed(number)
    by_keys, by_values = (torch.randn((1, *keys.shape[1:]), generator=generator).expand(keys.shape) for _ in "kv")
    at = torch.from_numpy(positions)
    by_keys = rotate_keys(by_keys, RopeShift.between(torch.zeros_like(at), at, rope.inv_freq), rope.pairing)
    place.write(number, keys + by_keys, values + by_values)


def ask_preempted(served, prompt, preempt_after):
    """The answer to a prompt whose blocks are taken away behind some steps, as vLLM does where memory is short."""
    served.llm.llm_engine.add_request("preempted", {"prompt_token_ids": prompt}, parameters(None, 6))
    scheduler, steps, finished = served.vllm_scheduler, 0, None
    while served.llm.llm_engine.has_unfinished_requests():
        for output in served.llm.llm_engine.step():
            finished = output if output.finished else finished
        steps += 1
        if steps in preempt_after and scheduler.running:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, 0.0)
            served.scheduler._attempts.running[
                request.request_id
            ].hashes.renew()  # as where vLLM's own step tells of it
    return answer_of(finished)


@pytest.mark.usefixtures("no_exact_fronts")
def test_constant_drift_is_taken_away_exactly(served, drifting, monkeypatch):
    """Through pieces and rings, and where vLLM begins a request again: what is corrected twice would have moved on.

    Of a longer question the last rows alone are computed once more after the correction.
    """
    prompt = KNOWN + LONG_QUESTION[:QUERY_ROWS]
    cold = served.cold(prompt)

    def again(ask, *args):
        served.forget_donors()
        served.donate(KNOWN)
        drifting.clear()
        answer = ask(*args)
        assert drifting
        return answer

    warm = again(served.ask, prompt)
    assert warm.shifted > 400
    assert 0 < warm.report["corrected_tokens"] <= warm.shifted
    warm.assert_like(cold, tolerance=1e-3)
    again(ask_preempted, served, prompt, (2, 5, 8)).assert_like(cold, tolerance=1e-3)
    monkeypatch.setattr(served.worker, "_correction", None)
    spoilt = again(served.ask, prompt)
    assert spoilt.report["corrected_tokens"] == 0
    with pytest.raises(AssertionError):
        spoilt.assert_like(cold, tolerance=1e-3)


def test_an_exact_front_is_neither_computed_again_nor_corrected(served):
    prompt = KNOWN + LONG_QUESTION
    cold = served.cold(prompt)
    served.donate(KNOWN)
    warm = served.ask(prompt)
    (span,) = warm.report["spans"]
    assert (span["fidelity"], span["target_start"], span["length"]) == ("exact", 0, len(KNOWN))
    assert (warm.report["exact_tokens"], warm.shifted) == (len(KNOWN), 0)
    assert (warm.report["recomputed_tokens"], warm.report["corrected_tokens"], warm.report["policy"]) == (0, 0, "none")
    warm.assert_like(cold)


@pytest.fixture
def guarded(served, monkeypatch):
    """Every step of every graft leaves all K/V as they are that are not its request's own, behind its exact prefix."""
    steps = []
    layers = [layer for group in served.worker._groups for layer in group.layers]

    def step_and_compare(self, max_rows, step=GraftJob.step):
        command = self.command
        own = {0}.union(*(ids[command.plan.prefix_len // BLOCK :] for ids in command.block_ids))
        before = [layer.cache.clone() for layer in layers]
        num_rows = step(self, max_rows)
        others = sorted(set(range(len(layers[0].cache))) - own)
        for layer, then in zip(layers, before, strict=True):
            assert torch.equal(layer.cache[others], then[others]), layer.name
        steps.append((command.request_id, command.plan.prefix_len))
        return num_rows

    monkeypatch.setattr(GraftJob, "step", step_and_compare)
    return steps


def donors_of(served):
    catalogue, store = served.scheduler.registry.catalogue, served.worker._donors
    return {donor.donor_id: store.get(donor.donor_id, 0, donor.num_tokens) for donor in catalogue}


def test_nobody_elses_tokens_are_touched(served, guarded, made, model_folder):
    """Neither the blocks of another request of the same step, nor a prefix that both share, nor any donor."""
    head = text(65, 100)  # three blocks, and the beginning of one in which a graft begins
    prompts = [head + DOCUMENTS[0] + BETWEEN + DOCUMENTS[1] + QUESTION, head + DOCUMENTS[2] + LONG_QUESTION]

    def read_donors():
        served.forget_donors()
        served.donate(*DONORS)
        served.ask(head + text(67, 5), "exact", max_tokens=1)

    alone = []
    for prompt in prompts:
        read_donors()
        alone.append(served.ask(prompt))
    read_donors()
    made.clear(), guarded.clear()
    kept = {
        donor_id: (block, [tensor.clone() for tensor in (*block.keys, *block.values)])
        for donor_id, block in donors_of(served).items()
    }
    together = served.ask_many(prompts, [None, None])
    assert len({request_id for request_id, _ in guarded}) == 2
    assert all(answer.report["corrected_tokens"] > 0 for answer in together)
    for answer, expected in zip(together, alone, strict=True):
        answer.assert_like(expected, tolerance=1e-3)
    for block, then in kept.values():
        for now, before in zip((*block.keys, *block.values), then, strict=True):
            assert torch.equal(now, before)
    if served.family != "gemma3":
        assert {prefix_len for _, prefix_len in guarded} == {96}
        assert_heads_are_exact(served, model_folder, head, made)


def assert_heads_are_exact(served, model_folder, head, made):
    """The tokens in front of a graft in its first block are what a full prefill gives."""
    adapter = LLM(save_tiny(served.family, model_folder), num_slots=512, dtype="float32").engine.adapter
    exact = own_kv(adapter, np.array(head))
    for positions, kv in made:
        num_exact = len(head) - int(positions[0])
        assert num_exact == 4
        for layer, pair in enumerate(exact):
            for here, there in zip((kv.keys[layer], kv.values[layer]), pair, strict=True):
                torch.testing.assert_close(here[:num_exact], there[-num_exact:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("served", ["llama", "llama in pieces", "gemma3"], indirect=True)
def test_failure_while_correcting_is_a_counted_miss(served, monkeypatch):
    cold = served.cold(PROMPT)
    served.donate(*DONORS)
    calls = []

    def fails_late(self, *args, corrected=DriftCorrection.corrected):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room")
        return corrected(self, *args)

    monkeypatch.setattr(DriftCorrection, "corrected", fails_late)
    answer = served.ask(PROMPT)
    assert len(calls) == 2
    answer.assert_like(cold)
    assert answer.shifted == answer.report["corrected_tokens"] == 0
    assert answer.report["miss"]["reason"] == "error"
    assert answer.report["miss"]["detail"].endswith("MemoryError: no room")
    assert served.scheduler.counts.num_errors == 1
    monkeypatch.undo()
    served.llm.reset_prefix_cache()
    assert served.ask(text(68, 50) + DOCUMENTS[0] + QUESTION).report["corrected_tokens"] > 0
