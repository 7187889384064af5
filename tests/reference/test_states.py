"""Models with layers that keep a state, against their own forward: any cut, any batch, any continuation of a copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvgraft.engine.model.own_noise as own_noise_module
import kvgraft.engine.model.self_check as self_check_module
from kvgraft.engine.model.adapter import TransformersAdapter, take_over
from kvgraft.engine.model.mixers import MixerForward
from kvgraft.engine.model.self_check import PROBE_STATES, probe_slots, self_check
from kvgraft.engine.model.state_check import state_error
from kvgraft.errors import ConfigError, CorruptCacheError, ModelError
from kvgraft.graft.model import PassAbandonedError, SequenceRows
from kvgraft.memory.pool import SlotPlace
from kvgraft.testing.tiny_models import STATE_FAMILIES, VOCABULARY, tiny_model

NUM_SLOTS = 512
TOLERANCE = 1e-4
ONE_OF_EACH_MIXER = ["qwen3_next", "jamba", "bamba", "lfm2"]
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 64,
    "long_factor": [4.0] * 8,
    "short_factor": [1.0] * 8,
}
KIMI = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def make_adapter(family, **options):
    return TransformersAdapter.create(tiny_model(family), num_slots=NUM_SLOTS, num_states=5, **options)


class Sequence:
    """A text that is computed piece by piece in a state, and the logits of its rows so far."""

    def __init__(self, token_ids, kv_indices, state):
        self.token_ids, self.kv_indices, self.state = token_ids, kv_indices, state
        self.start = 0
        self.logits = []

    def rows(self, length, **options):
        positions = np.arange(self.start, min(len(self.token_ids), self.start + length))
        self.start += len(positions)
        asked = {"num_logits": len(positions), "state": self.state} | options
        return SequenceRows(self.token_ids[positions], positions, self.kv_indices, **asked)

    @property
    def is_done(self):
        return self.start == len(self.token_ids)


def make_sequences(rng, *lengths):
    slots = rng.permutation(NUM_SLOTS)
    ends = np.cumsum(lengths)
    return [
        Sequence(rng.integers(3, VOCABULARY, length), slots[end - length : end], state)
        for state, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


def forward(adapter, sequences, lengths):
    """One pass over the next rows of each."""
    batch = [sequence.rows(length) for sequence, length in zip(sequences, lengths, strict=True)]
    for sequence, output in zip(sequences, adapter.forward(batch), strict=True):
        sequence.logits.append(output.logits)


@torch.inference_mode()
def stock_logits(adapter, token_ids):
    with adapter.stock() as model:
        return model(input_ids=torch.from_numpy(token_ids)[None], use_cache=False).logits[0].float()


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def assert_exact(adapter, sequence):
    expected = stock_logits(adapter, sequence.token_ids)[: sequence.start]
    assert relative_error(torch.cat(sequence.logits), expected) < TOLERANCE


def state_of(adapter, state):
    block = adapter.states.export(state)
    return [*block.parts, torch.tensor(block.num_tokens)]


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_a_whole_prompt_longer_than_a_chunk_gives_the_stock_logits(family, rng):
    adapter = make_adapter(family)
    (sequence,) = make_sequences(rng, 150)
    forward(adapter, [sequence], [150])
    assert_exact(adapter, sequence)
    assert adapter.states.num_tokens(0) == 150


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_any_cut_and_batch_gives_the_stock_logits(family, rng):
    adapter = make_adapter(family)
    sequences = make_sequences(rng, 170, 90, 33, 1)
    while waiting := [sequence for sequence in sequences if not sequence.is_done]:
        chosen = [sequence for sequence in waiting if rng.random() < 0.7] or waiting
        rng.shuffle(chosen)
        forward(adapter, chosen, rng.choice([1, 1, 1, 2, 3, 7, 30, 70], len(chosen)))
    for sequence in sequences:
        assert_exact(adapter, sequence)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_decoding_beside_a_prefill_gives_the_stock_logits(family, rng):
    adapter = make_adapter(family)
    first, second, late = make_sequences(rng, 80, 21, 100)
    forward(adapter, [first, second], [70, 11])
    for step in range(10):
        beside = [late] if step % 3 == 1 else []
        forward(adapter, [first, *beside, second], [1, *[34] * len(beside), 1])
    for sequence in (first, second, late):
        assert_exact(adapter, sequence)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_another_text_s_state_changes_the_answer(family, rng):
    """Or the other tests would prove nothing."""
    adapter = make_adapter(family)
    first, other = make_sequences(rng, 60, 40)
    forward(adapter, [first, other], [40, 40])
    adapter.states.copy(1, 0)
    forward(adapter, [first], [20])
    expected = stock_logits(adapter, first.token_ids)
    assert relative_error(torch.cat(first.logits)[40:], expected[40:]) > 100 * TOLERANCE


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_copies_of_a_state_go_on_alone(family, rng):
    adapter = make_adapter(family)
    front, one, other = make_sequences(rng, 66, 90, 80)
    forward(adapter, [front], [66])
    kept = state_of(adapter, 0)
    block = adapter.states.export(0)
    for sequence in (one, other):
        sequence.token_ids[:66] = front.token_ids
        sequence.kv_indices[:66] = front.kv_indices
        sequence.start = 66
        sequence.logits = list(front.logits)
    adapter.states.copy(0, one.state)
    adapter.states.load(other.state, block)
    for lengths in ((1, 5), (20, 1), (3, 8)):
        forward(adapter, [one, other], lengths)
    assert_exact(adapter, one)
    assert_exact(adapter, other)
    assert same(state_of(adapter, 0), kept)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_copies_amid_rows_are_the_states_of_passes_that_end_there(family, rng):
    """Several of one sequence, at the end and amid it, beside sequences with one and without; and all go on."""
    adapter = make_adapter(family)
    first, second = make_sequences(rng, 90, 50)
    batch = [
        first.rows(80, snapshots={30: 3, 79: 4, 81: 0}),
        second.rows(30, snapshots={30: 2}),
    ]
    for sequence, output in zip((first, second), adapter.forward(batch), strict=True):
        sequence.logits.append(output.logits)
    forward(adapter, [first, second], [10, 20])
    assert_exact(adapter, first)
    assert_exact(adapter, second)
    cold = make_adapter(family)
    for sequence, length, slot in ((first, 30, 3), (first, 79, 4), (second, 30, 2)):
        cold.states.clear(0)
        cut = Sequence(sequence.token_ids, sequence.kv_indices, 0)
        forward(cold, [cut], [length])
        assert adapter.states.num_tokens(slot) == length
        for found, due in zip(state_of(adapter, slot)[:-1], state_of(cold, 0)[:-1], strict=True):
            assert relative_error(found.float(), due.float()) < TOLERANCE


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_the_self_check_accepts_the_model_and_moves_nothing(family):
    adapter = make_adapter(family)
    report = self_check(adapter, np.arange(probe_slots(adapter)))
    assert report.forward_error < TOLERANCE
    assert (
        report.refusal == "layers of this model keep a state, which has no positions; K/V of this model are not moved"
    )
    assert adapter.rope is None
    fresh = state_of(adapter, 4)
    assert all(same(state_of(adapter, state), fresh) for state in range(PROBE_STATES))


def test_the_self_check_makes_do_with_few_slots():
    adapter = TransformersAdapter.create(tiny_model("bamba"), num_slots=64)
    assert probe_slots(adapter) == 64
    assert self_check(adapter, np.arange(64)).forward_error < TOLERANCE


def test_the_self_check_runs_past_a_chunk():
    adapter = make_adapter("qwen3_next")
    assert adapter.layers.chunk_size == 64
    assert probe_slots(adapter) == 240
    assert make_adapter("bamba").layers.chunk_size == 32


def test_the_self_check_sees_a_scan_that_begins_anew_in_every_piece():
    model = tiny_model("jamba")
    layers = take_over(model)
    assert not any(mixer.takes_runs for mixer in layers.mixers)
    wrong = replace(layers, mixers=tuple(replace(mixer, takes_runs=True) for mixer in layers.mixers))
    adapter = TransformersAdapter.create(model, num_slots=NUM_SLOTS)
    adapter.layers = wrong
    with adapter.stock():
        pass  # which leaves the model with the wrong mixers
    with pytest.raises(ModelError, match="logits differ from the model's own"):
        self_check(adapter, np.arange(probe_slots(adapter)))


ROUNDED = [17, 20, 30, 95, 119]
"""Random Qwen3-Next models that differ from themselves by more than `TOLERANCE` when their prompt is cut."""


@pytest.mark.parametrize("seed", ROUNDED)
def test_a_model_that_rounds_as_much_against_itself_passes_the_self_check(seed):
    adapter = TransformersAdapter.create(tiny_model("qwen3_next", seed=seed), num_slots=NUM_SLOTS)
    assert TOLERANCE < self_check(adapter, np.arange(probe_slots(adapter))).forward_error < 1e-3


@pytest.mark.parametrize("seed", [0, 17, 30])
def test_kv_that_are_wrong_by_a_few_times_that_are_refused(seed, monkeypatch):
    """Each head's keys and values get a little of the other head's, as a layout of another stride would mix them."""
    adapter = TransformersAdapter.create(tiny_model("qwen3_next", seed=seed), num_slots=NUM_SLOTS)
    write = SlotPlace.write

    def mixed(place, layer, keys, values):
        write(place, layer, *(one + share * one.flip(1) for one in (keys, values)))

    slots = np.arange(probe_slots(adapter))
    healthy = max(TOLERANCE, state_error(adapter, adapter.states, slots))
    monkeypatch.setattr(self_check_module, "_check_slots", lambda *_: None)  # would see it at once
    monkeypatch.setattr(SlotPlace, "write", mixed)
    share = 1e-4
    while (error := state_error(adapter, adapter.states, slots)) <= 3 * healthy:
        share *= 1.5
    assert error < 9 * healthy, "a few times"
    with pytest.raises(ModelError, match="which is more than rounding; kvgraft does not understand"):
        self_check(adapter, slots)


def test_a_model_that_is_another_one_in_pieces_is_held_to_the_tolerance(monkeypatch):
    """What a model differs from itself by is no excuse where that is no rounding: it is said, and the model refused."""
    adapter = TransformersAdapter.create(tiny_model("qwen3_next", seed=17), num_slots=NUM_SLOTS)
    monkeypatch.setattr(self_check_module, "own_noise", lambda *_: 0.3)
    with pytest.raises(
        ModelError, match=r"allowed 1.0e-04\), and its own by 3.0e-01 where its prompt is computed in pie"
    ):
        self_check(adapter, np.arange(probe_slots(adapter)))


def test_a_model_that_fails_in_pieces_is_held_to_the_tolerance(monkeypatch):
    adapter = TransformersAdapter.create(tiny_model("qwen3_next", seed=17), num_slots=NUM_SLOTS)
    monkeypatch.setattr(own_noise_module, "cache_of", lambda _: 1 / 0)
    with pytest.raises(
        ModelError, match=r"allowed 1.0e-04\), and its own fails where its prompt is computed in pieces"
    ):
        self_check(adapter, np.arange(probe_slots(adapter)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ONE_OF_EACH_MIXER)
def test_half_precision_passes_the_self_check(family, dtype):
    adapter = TransformersAdapter.create(tiny_model(family, dtype=dtype), num_slots=NUM_SLOTS)
    self_check(adapter, np.arange(probe_slots(adapter)))


@pytest.mark.parametrize("family", ONE_OF_EACH_MIXER)
def test_an_abandoned_pass_moves_no_state(family, rng):
    adapter = make_adapter(family)
    (sequence,) = make_sequences(rng, 90)
    forward(adapter, [sequence], [40])
    before = state_of(adapter, 0)
    for refused in (1, 2, 4):  # at the first layers, with a state and with K/V, and at a later one
        asked = iter(range(1, 100))
        rows = sequence.rows(30, is_abandoned=lambda asked=asked, refused=refused: next(asked) == refused)
        with pytest.raises(PassAbandonedError):
            adapter.forward([rows])
        sequence.start = 40
        assert same(state_of(adapter, 0), before)
    forward(adapter, [sequence], [50])
    assert_exact(adapter, sequence)


def test_a_pass_that_fails_moves_no_state_of_any_sequence(rng):
    adapter = make_adapter("qwen3_next")
    sequences = make_sequences(rng, 50, 60)
    forward(adapter, sequences, [20, 1])
    before = [state_of(adapter, state) for state in (0, 1)]
    head = adapter.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapter.forward([sequences[0].rows(1), sequences[1].rows(30)])
    handle.remove()
    assert [same(state_of(adapter, state), before[state]) for state in (0, 1)] == [True, True]
    sequences[0].start, sequences[1].start = 20, 1
    forward(adapter, sequences, [30, 59])
    for sequence in sequences:
        assert_exact(adapter, sequence)


def test_spare_rows_touch_no_state(rng):
    """LongRoPE adds a row to pieces of long texts that lie before the switch."""
    model = tiny_model("lfm2", rope_parameters=LONG_ROPE)
    adapter = TransformersAdapter.create(model, num_slots=NUM_SLOTS, num_states=5)
    assert adapter.lengths.switch == 64
    (sequence,) = make_sequences(rng, 100)
    for length in (20, 1, 30, 49):
        (output,) = adapter.forward([sequence.rows(length, seq_len=100)])
        sequence.logits.append(output.logits)
    assert_exact(adapter, sequence)
    assert adapter.states.num_tokens(0) == 100
    fresh = state_of(adapter, 4)
    assert all(same(state_of(adapter, state), fresh) for state in (1, 2, 3))


def test_rows_that_do_not_follow_their_state_are_refused(rng):
    adapter = make_adapter("lfm2")
    (sequence,) = make_sequences(rng, 50)
    forward(adapter, [sequence], [20])
    before = state_of(adapter, 0)

    def rows(positions, state=0):
        positions = np.asarray(positions)
        return SequenceRows(sequence.token_ids[positions], positions, sequence.kv_indices, state=state)

    for batch, complaint in (
        ([rows([19])], "do not follow its state after 20"),
        ([rows([21])], "do not follow its state after 20"),
        ([rows([0, 1])], "do not follow its state after 20"),
        ([rows([20, 22])], "do not follow its state after 20"),
        ([rows([1], state=3)], "do not follow its state after 0"),
        ([rows([20], state=None)], "without the slot of their state"),
        ([rows([20]), rows([20])], "two sequences of a pass have one state"),
        ([replace(rows([20, 21]), snapshots={21: 0})], "two sequences of a pass have one state"),
    ):
        with pytest.raises(CorruptCacheError, match=complaint):
            adapter.forward(batch)
    with pytest.raises(ConfigError, match="states must lie in"):
        adapter.forward([rows([20], state=5)])
    assert same(state_of(adapter, 0), before)


def test_a_lent_model_has_its_own_mixers():
    adapter = make_adapter("qwen3_next")
    modules = [adapter.model.get_submodule(mixer.name) for mixer in adapter.layers.mixers]
    assert len(modules) == 2
    assert all(isinstance(module.forward, MixerForward) for module in modules)
    with adapter.stock():
        assert not any("forward" in vars(module) for module in modules)
    assert all(isinstance(module.forward, MixerForward) for module in modules)


def test_two_engines_may_run_one_model(rng):
    model = tiny_model("falcon_h1")
    adapters = [TransformersAdapter.create(model, num_slots=NUM_SLOTS, num_states=2) for _ in range(2)]
    texts = [make_sequences(rng, 40)[0] for _ in range(2)]
    for length in (20, 1, 19):
        for adapter, sequence in zip(adapters, texts, strict=True):
            forward(adapter, [sequence], [length])
    for adapter, sequence in zip(adapters, texts, strict=True):
        assert_exact(adapter, sequence)


def test_layers_are_counted_by_what_they_keep():
    """K/V in layers 1 and 4 of five; of the others one keeps nothing."""
    adapter = make_adapter("nemotron_h")
    assert adapter.layers.numbers == (1, 4)
    assert [mixer.layer for mixer in adapter.layers.mixers] == [0, 3]
    assert adapter.num_layers == len(adapter.pool.layers) == 2
    assert adapter.pool.bytes_per_token == sum(adapter.layers.bytes_per_token(torch.float32)) == 2 * 2 * 2 * 16 * 4
    convolution, recurrent = (8 * 16 + 2 * 2 * 16) * 4, 8 * 16 * 16
    assert adapter.states.bytes_per_state == adapter.layers.bytes_per_state == 2 * (convolution + recurrent) * 4


def test_the_reference_kernels_take_flex_attention(rng):
    adapter = make_adapter("qwen3_next", attention="flex")
    sequences = make_sequences(rng, 60, 20)
    for lengths in ((30, 1), (1, 12), (29, 7)):
        forward(adapter, sequences, lengths)
    for sequence in sequences:
        assert_exact(adapter, sequence)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("kimi_linear", KIMI, "multi-head latent attention"),
        (
            "zamba2",
            {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "num_key_value_heads": 4},
            "share attention under the number -1",
        ),
        ("nemotron_h", {"time_step_min": 0.05}, "other results for single tokens than for several at once"),
        ("minimax", {"num_local_experts": 4}, "does not keep keys and values"),
        ("zaya", {}, "does not take and make rows alone"),
        ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2}, "keeps no K/V cache"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(family, overrides, reason):
    with pytest.raises(ModelError, match=reason) as refused:
        take_over(tiny_model(family, **overrides))
    assert "choose another model" in str(refused.value) or "choose a decoder" in str(refused.value)
    assert "\n" not in str(refused.value)
