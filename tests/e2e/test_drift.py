"""Drift correction and looks in the embedded engine: exact where drift is constant, and no request harms another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL
from tests.support.kept_kv import assert_donors_are_exact, own_kv

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.drift_pass import BatchDrift
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.model.self_check import self_check
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.errors import ConfigError, PolicyError
from kvgraft.graft.drift import CORRECTIONS, DriftCorrection, KeyFrame
from kvgraft.graft.drift_estimate import MeanShift
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.rope import RopeShift, rotate_keys
from kvgraft.graft.select import Adaptive, KVDeviation, Observation, QueryAttention, QuerySeam, RandomShare, Recompute
from kvgraft.graft.sparse_prefill import SparsePrefill
from kvgraft.graft.steps import GraftSteps
from kvgraft.memory import HybridSlotPool
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import DonorId, GraftPlan, Match

NUM_TOKENS = 200
SPANS = ((8, 50), (60, 90), (150, 40))
"""Start and length; 58, 59 and what is behind 190 is computed, and the exact prefix ends in front of 8."""
GREEDY = SamplingParams(8, ignore_eos=True)


def make_plan(prefix_len=5):
    spans = tuple(Match(start, DonorId(number), 0, length) for number, (start, length) in enumerate(SPANS))
    computed = np.arange(prefix_len, NUM_TOKENS)
    reused = np.concatenate([np.arange(start, start + length) for start, length in SPANS])
    return GraftPlan(NUM_TOKENS, prefix_len, spans, np.setdiff1d(computed, reused))


def num_recomputed(outcome):
    return sum(length for _, length in outcome.work.recomputed_runs)


class Prompt:
    """A prompt in slots of a model: exact K/V everywhere, or moved ones where it is reused."""

    def __init__(self, rng, family="llama", dtype=torch.float32, *, is_hybrid=False):
        model = tiny_model(family, dtype=dtype, num_hidden_layers=4)
        if is_hybrid:
            engine = Engine(adopt_model(family, model, None), EngineConfig(num_slots=2_000, dtype="float32"))
            self.adapter = engine.adapter
            assert isinstance(self.adapter.pool, HybridSlotPool)
        else:
            self.adapter = TransformersAdapter.create(model, num_slots=400)
            self_check(self.adapter, np.arange(400), 400)
        self.token_ids = rng.integers(3, VOCABULARY, NUM_TOKENS)
        self.slots = rng.permutation(300)[:NUM_TOKENS]
        self.window_slots = rng.permutation(300)[:NUM_TOKENS] if is_hybrid else None
        self.plan = make_plan()
        rows = SequenceRows(self.token_ids, np.arange(NUM_TOKENS), self.slots, swa_indices=self.window_slots)
        self.logits = self.adapter.forward([rows])[0].logits[-1]
        self.exact = [tuple(x.clone() for x in self.read(layer)) for layer in range(self.adapter.num_layers)]

    def read(self, layer, positions=None):
        positions = np.arange(NUM_TOKENS) if positions is None else positions
        return self.place(positions).read(layer)

    def place(self, positions):
        windows = None if self.window_slots is None else self.window_slots[positions]
        return self.adapter.pool.place(self.slots[positions], windows)

    def restore(self):
        for layer, (keys, values) in enumerate(self.exact):
            self.place(np.arange(NUM_TOKENS)).write(layer, keys, values)

    def move(self, frame=KeyFrame.COMMON, seed=0):
        """Move every run in every layer but the first by a shift of its own; what is not reused is spoilt altogether."""
        self.restore()
        generator = torch.Generator().manual_seed(seed)
        for layer, (keys, values) in enumerate(self.exact):
            spoilt = self.plan.compute
            self.place(spoilt).write(layer, keys[spoilt] * 0 + 3, values[spoilt] * 0 - 3)
            for start, length in SPANS if layer else ():
                at = np.arange(start, start + length)
                shift = [torch.randn(1, *keys.shape[1:], generator=generator).to(keys.dtype) for _ in "kv"]
                moved = shift[0].expand(length, -1, -1)
                rope = self.adapter.rope[layer]
                if frame is KeyFrame.COMMON and rope is not None:
                    positions = torch.from_numpy(at)
                    turn = RopeShift.between(torch.zeros_like(positions), positions, rope.inv_freq)
                    moved = rotate_keys(moved, turn, rope.pairing)
                self.place(at).write(layer, keys[at] + moved, values[at] + shift[1])

    def sparse_prefill(self, policy, correction):
        steps = GraftSteps(self.plan, policy, token_ids=self.token_ids, correction=correction)
        return SparsePrefill(self.token_ids, self.slots, steps, swa_indices=self.window_slots)

    def prefill(self, policy, correction, max_rows=10_000):
        prefill = self.sparse_prefill(policy, correction)
        outcome, pieces = None, 0
        while outcome is None:
            outcome = prefill.receive(self.adapter.forward([prefill.next_rows(max_rows)])[0])
            pieces += 1
        return outcome, pieces

    def error(self):
        """Largest difference of any K/V from the exact ones, relative to the largest of its layer."""
        worst = 0.0
        for layer, exact in enumerate(self.exact):
            for now, then in zip(self.read(layer), exact, strict=True):
                worst = max(worst, float((now - then).abs().max() / then.abs().max()))
        return worst


RAW = MeanShift(shrink=False)


@pytest.mark.parametrize("frame", KeyFrame)
@pytest.mark.parametrize(
    "policy",
    [
        RandomShare(0.2),
        QueryAttention(0.3, 1.0),
        QuerySeam(0.5),
        QuerySeam(0.5, 0.8, "attention"),
        Adaptive(0.4, 10.0, 1.0),
    ],
    ids=lambda policy: policy.name,
)
def test_constant_drift_is_taken_away_exactly(policy, frame, rng):
    """The rows behind the first computed one run again after a look, so that nothing is left of what the look saw."""
    prompt = Prompt(rng)
    prompt.move(frame)
    outcome, _ = prompt.prefill(policy, None)
    assert outcome.work.num_corrected == 0
    assert prompt.error() > 0.1
    prompt.move(frame)
    corrected, _ = prompt.prefill(policy, DriftCorrection(RAW, frame))
    assert corrected.work.num_corrected == sum(length for _, length in SPANS) - num_recomputed(corrected) > 0
    assert prompt.error() < 1e-4
    assert torch.allclose(corrected.logits, prompt.logits, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "mistral", "gpt_neox", "glm4", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("frame", KeyFrame)
def test_constant_drift_is_taken_away_in_other_architectures(family, frame, rng):
    prompt = Prompt(rng, family)
    prompt.move(frame)
    prompt.prefill(RandomShare(0.3), DriftCorrection(RAW, frame))
    assert prompt.error() < 1e-4


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "mistral", "gpt_oss", "llama4_text"])
def test_window_layers_with_slots_of_their_own_are_corrected(family, rng):
    prompt = Prompt(rng, family, is_hybrid=True)
    prompt.move()
    prompt.prefill(RandomShare(0.3), DriftCorrection(RAW))
    assert prompt.error() < 1e-4


def test_tokens_without_a_window_slot_are_corrected_in_full_layers_only(rng):
    prompt = Prompt(rng, "gemma3_text", is_hybrid=True)
    prompt.move()
    before = [tuple(x.clone() for x in prompt.read(layer)) for layer in range(prompt.adapter.num_layers)]
    rows = prompt.sparse_prefill(RandomShare(0.3), DriftCorrection(RAW)).next_rows(10_000)
    gone = np.setdiff1d(np.arange(8, 20), rows.positions)
    held = prompt.window_slots.copy()
    held[gone] = -1
    rows = replace(rows, swa_indices=held)
    drift = BatchDrift([rows], prompt.adapter.pool, prompt.adapter.rope)
    for layer, (keys, values) in enumerate(prompt.exact):
        for corrected in drift.corrected(layer, keys[rows.positions], values[rows.positions]):
            corrected.write()
        is_window = prompt.adapter.pool.pool_of(layer)[0] is prompt.adapter.pool.window
        expected = before[layer] if is_window else prompt.exact[layer]
        for now, then in zip(prompt.read(layer, gone), expected, strict=True):
            assert torch.allclose(now, then[gone], atol=1e-4)


def test_bfloat16_pool_is_corrected_to_its_rounding(rng):
    prompt = Prompt(rng, dtype=torch.bfloat16)
    prompt.move()
    prompt.prefill(RandomShare(0.3), DriftCorrection(RAW))
    assert prompt.error() < 0.05


@pytest.mark.parametrize("policy", [RandomShare(0.2), QuerySeam(0.2), Adaptive(0.05, 1e-9)], ids=lambda p: p.name)
def test_how_a_pass_is_cut_changes_nothing(policy, rng):
    prompt = Prompt(rng)
    found = []
    for max_rows in (10_000, 40, 7, 1):
        prompt.move(seed=1)
        outcome, pieces = prompt.prefill(policy, DriftCorrection(), max_rows)
        found.append((outcome, pieces, [tuple(x.clone() for x in prompt.read(layer)) for layer in range(4)]))
    (whole, _, kv), *others = found
    assert [pieces for _, pieces, _ in found] == sorted(pieces for _, pieces, _ in found)
    assert found[-1][1] > found[0][1]
    for outcome, _, other in others:
        assert outcome.work.computed.tolist() == whole.work.computed.tolist()
        assert torch.allclose(outcome.logits, whole.logits, atol=1e-4)
        for one, two in zip(kv, other, strict=True):
            assert torch.allclose(one[0], two[0], atol=1e-4)
            assert torch.allclose(one[1], two[1], atol=1e-4)


def test_batched_rows_are_corrected_as_if_alone(rng):
    prompt = Prompt(rng)
    prompt.move(seed=2)
    alone, _ = prompt.prefill(RandomShare(0.2), DriftCorrection())
    kv = [prompt.read(layer)[0].clone() for layer in range(4)]
    prompt.move(seed=2)
    other_ids, other_slots = rng.integers(3, VOCABULARY, 50), np.arange(300, 350)
    other = SequenceRows(other_ids, np.arange(50), other_slots)
    expected = prompt.adapter.forward([other])[0].logits
    prefill = prompt.sparse_prefill(RandomShare(0.2), DriftCorrection())
    first, second = prompt.adapter.forward([other, prefill.next_rows(10_000)])
    outcome = prefill.receive(second)
    assert torch.allclose(first.logits, expected, atol=1e-5)
    assert torch.allclose(outcome.logits, alone.logits, atol=1e-4)
    for layer in range(4):
        assert torch.allclose(prompt.read(layer)[0], kv[layer], atol=1e-4)


def test_pass_that_runs_again_does_not_correct_twice(rng):
    prompt = Prompt(rng)
    prompt.move()
    prefill = prompt.sparse_prefill(RandomShare(0.2), DriftCorrection(RAW))
    rows = prefill.next_rows(10_000)
    prompt.adapter.forward([rows])
    prompt.adapter.forward([rows])
    assert prompt.error() < 1e-4


def test_failure_while_correcting_leaves_the_layer_as_it_was(rng, monkeypatch):
    prompt = Prompt(rng)
    prompt.move()
    rows = prompt.sparse_prefill(RandomShare(0.2), DriftCorrection(RAW)).next_rows(10_000)
    calls = []

    def fails_late(self, layout, moved, out, inner=MeanShift._shift):
        calls.append(1)
        if len(calls) == 4:  # values of the second layer that is corrected, after its keys
            raise MemoryError
        return inner(self, layout, moved, out)

    with monkeypatch.context() as patch:
        patch.setattr(MeanShift, "_shift", fails_late)
        with pytest.raises(PolicyError, match="MeanShift"):
            prompt.adapter.forward([rows])
    prompt.adapter.forward([rows])
    assert prompt.error() < 1e-4


def test_later_steps_add_what_earlier_ones_left(rng):
    """Nested budgets: the second step measures against corrected K/V, so constant drift leaves it nothing to do."""

    @dataclass(frozen=True)
    class Twice(RandomShare):
        def steps(self, context):
            for start in (0, 3):
                chosen = context.reused[start::5]
                yield Recompute(chosen, sample=chosen)

    prompt = Prompt(rng)
    prompt.move()
    outcome, pieces = prompt.prefill(Twice(0.5), DriftCorrection(RAW))
    assert pieces == 2
    assert num_recomputed(outcome) > 70
    assert prompt.error() < 1e-4


@dataclass(frozen=True)
class Seen(KVDeviation):
    """Keeps what it saw in `notes`."""

    notes: tuple = ()

    def _score(self, context, observation: Observation):
        self.notes[0].append(observation.key_deviation)
        return super()._score(context, observation)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("max_rows", [10_000, 33])
def test_key_deviation_is_the_distance_from_what_was_reused(family, layer, max_rows, rng):
    prompt = Prompt(rng, family)
    prompt.move()
    for number, (keys, values) in enumerate(prompt.exact):
        noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(number))
        prompt.place(np.arange(8, 58)).write(number, keys[8:58] + (noise[8:58] if number else 0), values[8:58])
    reused = np.concatenate([np.arange(start, start + length) for start, length in SPANS])
    # Live tokens are spoilt in the slots; the look computes all positions in the layers in front, so that none is stale.
    expected = (prompt.exact[layer][0] - prompt.read(layer)[0]).square().sum((1, 2))[reused]
    notes = []
    outcome, _ = prompt.prefill(Seen(0.1, layer, (notes,)), None, max_rows)
    assert np.allclose(notes[0][reused], expected, rtol=1e-3, atol=1e-4)
    chosen = np.isin(reused, np.setdiff1d(outcome.work.computed, prompt.plan.compute))
    assert chosen.sum() == np.ceil(0.1 * len(reused))
    assert expected[chosen].min() >= expected[~chosen].max() * (1 - 1e-3)
    ((looked, number),) = outcome.work.looks
    assert (looked.tolist(), number) == (list(range(5, NUM_TOKENS)), layer)


def test_look_at_a_layer_that_is_not_there_is_refused(rng):
    prompt = Prompt(rng)
    with pytest.raises(ConfigError, match="this model has 4; choose a lower one"):
        prompt.prefill(KVDeviation(0.1, 4), None)


def make_llm(family="llama", **settings):
    return LLM(
        adopt_model(family, tiny_model(family, num_hidden_layers=4), None),
        **SMALL | {"num_slots": 3_000, "correction": "drift"} | settings,
    )


def documents(rng, count=3):
    return [rng.integers(3, VOCABULARY, 150) for _ in range(count)]


def reordered(rng, texts):
    return np.concatenate([rng.integers(3, VOCABULARY, 20), *texts[::-1], rng.integers(3, VOCABULARY, 30)])


@pytest.mark.parametrize("selection", [RandomShare(0.2), QuerySeam(0.2, 0.3), Adaptive(0.05, 1e-9, 0.2)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_correction_touches_no_donor(selection, family, rng):
    llm, texts = make_llm(family), documents(rng)
    first = np.concatenate(texts)
    llm.generate(first, SamplingParams(1))
    output = llm.generate(reordered(rng, texts), GREEDY, selection=selection)[0]
    assert output.report.corrected_tokens > 0 or selection.name == "adaptive"
    assert output.report.shifted_tokens > 0 or selection.name == "adaptive"
    assert assert_donors_are_exact(llm.adapter, llm.space, [first]) > 0
    llm.check()


def test_report_counts_what_was_corrected_and_all_operations(rng):
    llm, texts = make_llm(), documents(rng)
    llm.generate(np.concatenate(texts), SamplingParams(1))
    prompt, continuation = reordered(rng, texts), rng.integers(3, VOCABULARY, 3)
    flops = llm.engine.manager.flops

    def report(selection, correction=None):
        return llm.score(prompt, continuation, selection=selection, correction=correction, repair="before").report

    random = report(RandomShare(0.2))
    assert random.corrected_tokens == random.shifted_tokens == 450 - 90
    assert random.recomputed_tokens == 90
    assert report(RandomShare(0.2), "none").corrected_tokens == 0
    heads = report("first_k")
    assert heads.corrected_tokens == heads.shifted_tokens > 0
    assert report("none").corrected_tokens == report(KVDeviation(0.1)).corrected_tokens == 0
    once = report("none").computed_flops
    assert once == flops.of_positions(np.r_[:20, 470:500])
    # A look at layer 1 costs one layer of four; two passes run the query twice.
    looked = report(KVDeviation(0.1)).computed_flops
    assert looked > once + flops.of_positions(np.arange(500)) / 4
    share = report(RandomShare(0.1)).computed_flops / report(RandomShare(0.1), "none").computed_flops
    assert 1 < share < 2  # in a model of 64 channels; attention of as many rows costs as much
    assert report(QuerySeam(0.1)).computed_flops > report(RandomShare(0.1)).computed_flops


def test_request_says_otherwise_than_the_setting(rng):
    llm, texts = make_llm(correction="none"), documents(rng)
    llm.generate(np.concatenate(texts), SamplingParams(1))

    def corrected(**options):
        prompt = reordered(rng, texts)  # begins with new words: the same prompt would go on from what it has
        return llm.generate(prompt, SamplingParams(1), selection="random", **options)[0].report.corrected_tokens

    assert corrected() == 0
    assert corrected(correction="drift") == corrected(correction=CORRECTIONS["drift"]) > 0
    assert make_llm().config.correction == "drift"
    for wrong in ("shift", 3):
        with pytest.raises(ConfigError, match="correction"):
            corrected(correction=wrong)
    with pytest.raises(ConfigError, match="unknown correction"):
        make_llm(correction="shift")


def run_all(engine, requests, *, preempt=False):
    """Tokens by request; each is preempted once in the middle of its prefill if asked for."""
    for request in requests:
        engine.add(request)
    tokens, victims = {request.request_id: [] for request in requests}, set()
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens[event.request_id].append(event.part.token_id)
        for active in list(engine.scheduler.running):
            if preempt and active.is_prefilling and active.request.request_id not in victims:
                victims.add(active.request.request_id)
                engine.scheduler.preempt(active)
    assert not preempt or len(victims) == len(requests)
    return tokens


@pytest.mark.parametrize("how", ["alone", "together", "in small pieces", "preempted"])
def test_answers_do_not_depend_on_what_runs_beside(how, rng):
    texts = documents(rng, 4)
    prompts = [reordered(rng, [texts[i] for i in chosen]) for chosen in ((0, 1), (2, 3, 0), (3, 1))]
    expected = [out.token_ids for out in make_and_read(texts).generate(prompts, GREEDY, selection=RandomShare(0.2))]
    plain = make_and_read(texts, correction="none").generate(prompts, GREEDY, selection=RandomShare(0.2))
    assert [out.token_ids for out in plain] != expected, "the correction must change something for this test to tell"
    settings = {"max_rows": 64} if how in ("in small pieces", "preempted") else {}
    engine = make_and_read(texts, **settings)._engine
    requests = [engine.builder.build(prompt, RequestOptions(GREEDY, selection=RandomShare(0.2))) for prompt in prompts]
    groups = [[request] for request in requests] if how == "alone" else [requests]
    found = {}
    for group in groups:
        found |= run_all(engine, group, preempt=how == "preempted")
    assert [tuple(found[request.request_id]) for request in requests] == expected


def make_and_read(texts, **settings):
    llm = make_llm(**settings)
    llm.generate(np.concatenate(texts), SamplingParams(1))
    return llm


def test_corrected_tokens_stay_approximate(rng):
    """Neither the prefix cache nor donors of generation 0 get anything of what was corrected, or computed behind it."""
    texts = documents(rng)
    llm = make_and_read(texts)
    prompt = reordered(rng, texts)
    output = llm.generate(prompt, GREEDY, selection=RandomShare(0.2))[0]
    assert output.report.corrected_tokens > 0
    whole = np.concatenate([prompt, output.token_ids[:-1]])
    again = llm.score(prompt, whole[:1], "exact").report
    assert again.exact_tokens <= 20
    exact = own_kv(llm.adapter, whole)
    assert len(exact) == 4
    assert assert_donors_are_exact(llm.adapter, llm.space, [np.concatenate(texts), whole]) > 0
    assert all(span.generation == 0 for span in output.report.spans)
