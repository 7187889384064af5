"""Chosen tokens computed again over slots, with a small decoder whose full prefill is formed apart."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.integrations.sglang.rank_threads import FailsElsewhere

from kvgraft.errors import PolicyError
from kvgraft.graft.drift import DriftCorrection, drift_correction
from kvgraft.graft.drift_layout import DriftRun, RunLayout
from kvgraft.graft.rope import RopePairing, RopeShift, RopeSpec, rotate_keys
from kvgraft.graft.row_attention import GatheredKV, QueryRows
from kvgraft.graft.select import FirstK, QuerySeam, RandomShare, Recompute
from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
from kvgraft.integrations.sglang.planning.ranks import Ranks
from kvgraft.integrations.sglang.recompute import recomputer as recomputer_module
from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
from kvgraft.integrations.sglang.recompute.slot_attention import attend_in_blocks
from kvgraft.types import DonorId, GraftPlan, Match

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, SLOTS = 3, 4, 2, 8, 24, 600
SINKS = torch.linspace(-1, 3, HEADS)
SPEC = RopeSpec(100.0 ** (-torch.arange(0, DIM, 2) / DIM), RopePairing.HALF)


class Decoder:
    """Embedding and attention layers with residuals, in float32; a `RowModel`."""

    def __init__(self, sinks):
        generator = torch.Generator().manual_seed(1)

        def weight(*shape):
            return torch.randn(*shape, generator=generator) / shape[0] ** 0.5

        self.embedding = weight(1000, WIDTH) * 30
        self.layers = [
            (
                weight(WIDTH, HEADS * DIM),
                weight(WIDTH, KV_HEADS * DIM),
                weight(WIDTH, KV_HEADS * DIM),
                weight(32, WIDTH),
            )
            for _ in range(LAYERS)
        ]
        self.runs, self.fail_at, self.sinks = [], None, sinks

    def run(self, token_ids, rows, attention):
        self.runs.append(rows)

        def attend(number, query, keys, values):
            layer = SimpleNamespace(
                layer_id=number, tp_q_head_num=HEADS, head_dim=DIM, scaling=DIM**-0.5, logit_cap=0.0
            )
            broken = number == self.fail_at
            return attention.forward(
                query.flatten(1), None if broken else keys, values, layer, None, save_kv_cache=True, sinks=self.sinks
            )

        self._forward(token_ids, rows, attend)
        if attention.failure is not None:
            raise attention.failure

    def prefill(self, token_ids):
        """K/V of a full prefill by layer, and what each row pays to each position, summed over heads and layers."""
        kept, mass = [], torch.zeros(len(token_ids), len(token_ids))

        def attend(_, query, keys, values):
            kept.append((keys, values))
            group = HEADS // KV_HEADS
            scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * DIM**-0.5
            hidden = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
            sinks = torch.full((HEADS,), -torch.inf) if self.sinks is None else self.sinks
            sinks = sinks[:, None, None].expand(-1, len(query), 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            mass.add_(weights.sum(0))
            return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).flatten(1)

        self._forward(token_ids, np.arange(len(token_ids)), attend)
        return kept, mass

    def _forward(self, token_ids, rows, attend):
        hidden, positions = self.embedding[torch.from_numpy(token_ids)], torch.from_numpy(rows)
        turn = RopeShift.between(torch.zeros_like(positions), positions, SPEC.inv_freq)
        for number, (to_query, to_keys, to_values, out) in enumerate(self.layers):
            normed = torch.nn.functional.normalize(hidden, dim=1) * WIDTH**0.5
            query, keys = (
                rotate_keys((normed @ weight).view(len(rows), -1, DIM), turn, SPEC.pairing)
                for weight in (to_query, to_keys)
            )
            hidden = hidden + attend(number, query, keys, (normed @ to_values).view(len(rows), -1, DIM)) @ out


class Case:
    """A prompt of an exact head, a run, a gap, another run and a tail, in scattered slots, runs as they were elsewhere."""

    def __init__(self, tail=70, gap=8, sinks=SINKS):
        rng = np.random.default_rng(3)
        self.decoder = Decoder(sinks)
        self.tokens = rng.integers(0, 1000, 10 + 60 + gap + 40 + tail)
        self.runs = [(10, 70), (70 + gap, 110 + gap)]
        self.front = 110 + gap
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(2, LAYERS, SLOTS, KV_HEADS, DIM, generator=generator)
        self.keys, self.values = list(noise[0]), list(noise[1])
        self.slots = torch.from_numpy(rng.permutation(np.arange(1, SLOTS))[: self.front])
        self.buffers = KVBuffers(self.keys, self.values, [SPEC] * LAYERS)
        full, _ = self.decoder.prefill(self.tokens)
        other, _ = self.decoder.prefill(np.concatenate([rng.integers(0, 1000, 10), self.tokens[10 : self.front]]))
        for layer in range(LAYERS):
            for position, slot in enumerate(self.slots.tolist()):
                source = other if any(a <= position < b for a, b in self.runs) else full
                self.keys[layer][slot], self.values[layer][slot] = (part[position] for part in source[layer])
        self.full = full
        computed = np.setdiff1d(np.arange(10, len(self.tokens)), np.concatenate([np.arange(*run) for run in self.runs]))
        spans = tuple(Match(a, DonorId(number), 0, b - a) for number, (a, b) in enumerate(self.runs))
        self.plan = GraftPlan(len(self.tokens), 10, spans, computed)
        self.before = self.snapshot()

    def snapshot(self):
        return [(keys.clone(), values.clone()) for keys, values in zip(self.keys, self.values, strict=True)]

    def run(self, policy, correction=None, ranks=None, **options):
        made = Recomputer(self.decoder, self.buffers, policy, correction, ranks or Ranks(), **options)
        return made.run(self.tokens, self.plan, self.slots, policy)

    def error(self):
        """Per layer how far the runs' K/V are from a full prefill's, in their own slots."""
        positions = np.concatenate([np.arange(*run) for run in self.runs])
        slots = self.slots[positions]
        return [
            float((keys[slots] - self.full[layer][0][positions]).abs().max()) for layer, keys in enumerate(self.keys)
        ]

    def changed(self, layer):
        """Positions of the prompt, and slots of nobody, whose K/V in a layer are not what they were."""
        keys, values = self.before[layer]
        moved = ((keys != self.keys[layer]) | (values != self.values[layer])).flatten(1).any(1)
        own = {slot: position for position, slot in enumerate(self.slots.tolist())}
        return {own.get(slot, -slot) for slot in moved.nonzero().flatten().tolist()}


@pytest.fixture
def case():
    return Case()


def test_copies_were_wrong_and_everything_computed_again_is_a_full_prefill(case):
    assert max(case.error()) > 0.1
    found = case.run(FirstK(1000))
    assert sum(length for _, length in found.recomputed_runs) == 100
    assert max(case.error()) < 1e-5


@pytest.mark.parametrize("max_rows", [1, 7, 2048])
def test_how_a_pass_is_cut_changes_nothing(case, max_rows):
    case.run(QuerySeam(ratio=0.2), max_rows=max_rows)
    whole = Case()
    whole.run(QuerySeam(ratio=0.2))
    for mine, theirs in zip(case.snapshot(), whole.snapshot(), strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def test_nothing_is_written_but_what_was_chosen(case):
    found = case.run(RandomShare(ratio=0.2))
    assert sum(length for _, length in found.recomputed_runs) == 20
    assert found.num_corrected == 0
    (rows,) = case.decoder.runs
    for layer in range(1, LAYERS):
        assert case.changed(layer) == set(rows.tolist())
        assert all(any(a <= row < b for a, b in case.runs) for row in rows)


def test_a_computed_row_sees_nothing_behind_it(case):
    """What lies behind the last chosen row of another prompt is noise; rows come out the same."""
    other = Case()
    policy = FirstK(4)
    case.run(policy)
    for layer in range(LAYERS):
        other.keys[layer][other.slots[14:70]] = 7.0
        other.values[layer][other.slots[14:70]] = 7.0
    other.run(policy)
    first = case.slots[10:14]
    for mine, theirs in zip(case.keys, other.keys, strict=True):
        assert torch.allclose(mine[first], theirs[first], atol=1e-6)


def test_a_look_writes_nothing_and_sees_what_attention_is():
    """Of K/V that are a full prefill's the mass is that of a full prefill: query rows in the gap and in the tail."""
    case = Case(tail=40)
    case.run(FirstK(1000))
    seen = []

    class Watching(Ranks):
        def total(self, numbers):
            if len(numbers) > 1:  # not a vote on whether something has failed
                seen.append(numbers.clone())
            return numbers

    before = case.snapshot()
    case.run(QuerySeam(ratio=1e-9), ranks=Watching())
    _, mass = case.decoder.prefill(case.tokens)
    query = case.plan.compute[-64:]
    assert len(query) == 48  # the gap's rows too
    assert torch.allclose(seen[0], mass[query].sum(0), atol=1e-3)
    one = case.decoder.runs[-1]  # a share above 0 is at least one token
    for (keys, _), (old, _) in zip(case.snapshot(), before, strict=True):
        kept = torch.ones(SLOTS, dtype=torch.bool)
        kept[case.slots[one]] = False
        assert torch.equal(keys[kept], old[kept])


@pytest.mark.parametrize("num_rows", [1, 64, 130])
def test_rows_in_blocks_attend_as_each_would_alone(num_rows):
    generator = torch.Generator().manual_seed(2)
    positions = np.sort(np.random.default_rng(num_rows).permutation(300)[:num_rows])
    keys, values = torch.randn(2, 300, KV_HEADS, DIM, generator=generator)
    rows = QueryRows(torch.from_numpy(positions), torch.randn(num_rows, HEADS, DIM, generator=generator))
    stop = int(positions[-1]) + 1
    seen = GatheredKV(torch.arange(stop), keys[:stop], values[:stop])
    found = attend_in_blocks(0.3, positions, rows, seen)
    for number, position in enumerate(positions.tolist()):
        weights = torch.einsum("gkd,nkd->gkn", rows.query[number].view(KV_HEADS, -1, DIM).transpose(0, 1), keys)
        weights = (0.3 * weights[..., : position + 1]).softmax(-1)
        due = torch.einsum("gkn,nkd->kgd", weights, values[: position + 1]).reshape(HEADS, DIM)
        assert torch.allclose(found[number], due, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["fused", "with sinks"])
def test_everything_computed_again_is_a_full_prefill_with_any_kernel(sinks):
    case = Case(sinks=sinks)
    case.run(FirstK(1000))
    assert max(case.error()) < 1e-5


def test_the_last_rows_of_a_long_tail_look(monkeypatch):
    monkeypatch.setattr(recomputer_module, "MAX_LOOK_ROWS", 30)
    case = Case(tail=100)
    case.run(QuerySeam(ratio=0.1))
    looked = case.decoder.runs[0]
    assert looked.tolist() == list(range(len(case.tokens) - 64, len(case.tokens)))


def test_the_rest_is_corrected_by_what_the_sample_moved(case):
    correction = DriftCorrection()
    found = case.run(FirstK(8), correction)
    assert (found.recomputed_runs, found.num_corrected) == (((10, 8), (78, 8)), 84)
    plain = Case()
    plain.run(FirstK(8))
    # Layer 1: its rows depend on layer 0 alone, which nothing corrects, so both passes computed the same there.
    for first, last in case.runs:
        run = DriftRun(np.arange(first, first + 8), np.arange(first + 8, last))
        layout = RunLayout.of([run], torch.device("cpu"))
        sample, rest = case.slots[run.sample], case.slots[run.rest]
        old_keys, old_values = case.before[1]
        want = correction.corrected(
            layout,
            (plain.keys[1][sample], plain.values[1][sample]),
            (old_keys[sample], old_values[sample]),
            (old_keys[rest], old_values[rest]),
            SPEC,
        )
        assert torch.allclose(case.keys[1][rest], want[0], atol=1e-5)
        assert torch.allclose(case.values[1][rest], want[1], atol=1e-5)
        assert not torch.allclose(case.keys[1][rest], old_keys[rest], atol=1e-3)
        assert torch.equal(case.keys[0][rest], case.before[0][0][rest])


def test_a_correction_brings_the_rest_nearer(case):
    plain = Case()
    plain.run(FirstK(8))
    case.run(FirstK(8), drift_correction("drift"))
    rest = np.concatenate([np.arange(a + 8, b) for a, b in case.runs])

    def distance(world):
        slots = world.slots[rest]
        return sum(float((world.values[n][slots] - world.full[n][1][rest]).square().sum()) for n in range(1, LAYERS))

    assert distance(case) < distance(plain)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_failure_is_raised_behind_the_pass_and_later_layers_are_as_they_were(case, layer):
    case.decoder.fail_at = layer
    with pytest.raises(RuntimeError) as raised:
        case.run(FirstK(4))
    assert isinstance(raised.value.__cause__, AttributeError | TypeError)
    assert all(not case.changed(later) for later in range(layer, LAYERS))


class Failing(FirstK):
    """Chooses, then fails."""

    def steps(self, context):
        yield from super().steps(context)
        raise ValueError("no second step")


def test_behind_a_policy_that_fails_everything_can_be_computed(case):
    policy = Failing(4)
    with pytest.raises(PolicyError, match="no second step"):
        case.run(policy)
    assert max(case.error()) > 0.1
    made = Recomputer(case.decoder, case.buffers, policy, None, Ranks(), max_rows=50)
    made.run_all(case.tokens, case.slots, case.runs[0][0])
    for layer, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for found, due in ((keys, case.full[layer][0]), (values, case.full[layer][1])):
            assert torch.allclose(found[case.slots], due[: case.front], atol=1e-5)


class Afresh(FirstK):
    """Computes some tokens, then everything."""

    def steps(self, context):
        yield from super().steps(context)
        yield Recompute(context.reused[:0], afresh=True)


def test_a_step_afresh_computes_everything_from_the_first_copy_on(case):
    found = case.run(Afresh(4), DriftCorrection())
    assert case.decoder.runs[-1].tolist() == list(range(10, case.front))
    assert (found.recomputed_runs, found.num_corrected) == (((10, 60), (78, 40)), 0)
    for layer, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for computed, due in ((keys, case.full[layer][0]), (values, case.full[layer][1])):
            assert torch.allclose(computed[case.slots], due[: case.front], atol=1e-5)


def test_a_policy_that_fails_on_one_rank_fails_on_all(case):
    with pytest.raises(PolicyError, match="another rank"):
        case.run(FirstK(4), ranks=FailsElsewhere())
    assert not case.changed(1)


@pytest.fixture
def other(case):
    """Ranks of which another one has failed, in the first pass."""

    return FailsElsewhere(lambda: bool(case.decoder.runs))


def test_one_rank_that_cannot_look_keeps_all_from_computing(case, other):
    with pytest.raises(RuntimeError, match="another rank"):
        case.run(QuerySeam(ratio=0.1), ranks=other)
    assert len(case.decoder.runs) == 1
    assert not case.changed(1)


def test_no_rank_begins_another_pass_behind_one_that_failed_elsewhere(case, other):
    """In a pass ranks wait for one another, and one that has failed begins no other."""
    with pytest.raises(RuntimeError, match="another rank"):
        case.run(FirstK(8), ranks=other, max_rows=5)
    assert len(case.decoder.runs) == 1


def test_what_one_rank_cannot_compute_in_full_is_approximate_on_all(case, other):
    made = Recomputer(case.decoder, case.buffers, FirstK(4), None, other, max_rows=50)
    with pytest.raises(RuntimeError, match="another rank"):
        made.run_all(case.tokens, case.slots, 10)
    assert len(case.decoder.runs) == 1


@pytest.mark.parametrize(
    ("num_reused", "tail", "chosen"),
    [(400, 20, "query_seam"), (350, 4000, "first_k"), (100, 20, "first_k"), (100, 0, "query_seam"), (30, 0, None)],
)
def test_nobody_looks_where_a_look_costs_more_than_reuse_saves(case, num_reused, tail, chosen):
    policy, instead = QuerySeam(ratio=0.1), FirstK(8)
    made = Recomputer(case.decoder, case.buffers, policy, None, Ranks(), instead, per_pass=40.0)
    found = made.policy_for(num_reused, tail)
    assert (None if found is None else found.name) == chosen
