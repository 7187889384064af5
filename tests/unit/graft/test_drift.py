"""Drift correction: tensors in, tensors out; and which rows of a pass go together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.errors import ConfigError
from kvgraft.graft import drift_plan
from kvgraft.graft.drift import CORRECTIONS, DriftCorrection, KeyFrame, drift_correction
from kvgraft.graft.drift_estimate import KernelRidge, MeanShift, ReusedKV
from kvgraft.graft.drift_layout import DriftRun, Groups, RunLayout, _alike
from kvgraft.graft.drift_plan import MAX_RUN_ROWS, DriftPlan
from kvgraft.graft.rope import RopePairing, RopeShift, RopeSpec, rotate_keys
from kvgraft.graft.select import FirstK, SelectionContext

HEADS, DIM = 2, 8
ROPE = RopeSpec(1.0 / 100.0 ** (torch.arange(DIM // 2) / (DIM // 2)), RopePairing.HALF)
RUNS = (
    DriftRun(np.array([12, 15, 18, 30]), np.array([10, 11, 13, 29, 31])),
    DriftRun(np.array([50, 51, 52, 58, 59]), np.array([53, 60])),
)
LAYOUT = RunLayout.of(RUNS, torch.device("cpu"))
SAID_TWICE = RunLayout.of((DriftRun(RUNS[0].sample, RUNS[0].rest, np.arange(10, 16)), RUNS[1]), torch.device("cpu"))
"""The same, of whose first run the prompt says the first tokens before it, too."""
NUM_SAMPLED, NUM_REST = 9, 7
ESTIMATORS = [MeanShift(), KernelRidge(like=0.0), KernelRidge(like=3.0)]


class FromOneToken(KernelRidge):
    """Corrects a run however few of its tokens are sampled."""

    least_sample = 1


def random_kv(num_tokens, seed=0, dtype=torch.float32):
    return torch.randn(num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shifts_of(estimator, layout, facts, moved):
    """Shifts of the tokens that stay, in memory of their own that held something else."""
    out = torch.full((len(layout.rest_run), *moved.shape[1:]), torch.nan)
    assert estimator.for_layer(layout, facts)(moved, out) is out
    return out


def by_run(per_run, run_of):
    """One shift per run, (num_runs, heads, dim), for each token."""
    return per_run[run_of]


def corrected(correction, new, reused, rest, rope=ROPE):
    """Keys and values of the same numbers, corrected."""
    return correction.corrected(LAYOUT, (new, new), (reused, reused), (rest, rest), rope)


def rotate(keys, positions):
    shift = RopeShift.between(torch.zeros_like(positions), positions, ROPE.inv_freq)
    return rotate_keys(keys, shift, ROPE.pairing)


@pytest.mark.parametrize(
    ("starts", "lengths", "piece"),
    [((0, 4), (2, 3), None), ((1,), (4,), slice(1, 5)), ((0, 2), (2, 2), slice(0, 4)), ((0, 4), (2, 2), None)],
)
def test_groups_are_a_rectangle_and_back(starts, lengths, piece):
    groups = Groups.of(starts, lengths, torch.device("cpu"))
    tokens = torch.arange(20.0).view(10, 2)
    taken = groups.take(tokens)
    assert groups.piece == piece
    assert groups.exists.sum(1).tolist() == list(lengths)
    for row, start, length in zip(taken, starts, lengths, strict=True):
        assert torch.equal(row[:length], tokens[start : start + length])
    back = torch.full_like(tokens, -1)
    groups.put(taken, back)
    inside = torch.isin(torch.arange(10), groups.tokens)
    assert torch.equal(back[inside], tokens[inside])
    assert bool((back[~inside] == -1).all())


@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=40))
def test_runs_of_a_batch_are_of_like_length(lengths):
    batches = list(_alike(lengths))
    assert sorted(run for batch in batches for run in batch) == [run for run, length in enumerate(lengths) if length]
    for batch in batches:
        assert batch == sorted(batch)
        assert max(lengths[run] for run in batch) <= max(256, 2 * min(lengths[run] for run in batch))


@pytest.mark.parametrize("estimator", [KernelRidge(like=3.0), KernelRidge(like=0.0)])
def test_runs_of_unlike_length_are_estimated_as_if_each_were_alone(estimator):
    lengths = [(5, 700), (9, 40), (4, 3), (7, 290), (6, 310)]
    runs, start = [], 0
    for num_sampled, num_rest in lengths:
        positions = np.arange(start, start + num_sampled + num_rest)
        runs.append(DriftRun(positions[:num_sampled], positions[num_sampled:]))
        start += len(positions)
    layout = RunLayout.of(runs, torch.device("cpu"))
    sample = [random_kv(num, seed) for seed, (num, _) in enumerate(lengths)]
    rest = [random_kv(num, 10 + seed) for seed, (_, num) in enumerate(lengths)]
    moved = [random_kv(num, 20 + seed) for seed, (num, _) in enumerate(lengths)]
    facts = ReusedKV((torch.cat(sample),) * 2, (torch.cat(rest),) * 2)
    shifts = shifts_of(estimator, layout, facts, torch.cat(moved)).split([num for _, num in lengths])
    for run, *own, shift in zip(runs, sample, rest, moved, shifts, strict=True):
        alone = RunLayout.of([run], torch.device("cpu"))
        expected = shifts_of(estimator, alone, ReusedKV((own[0],) * 2, (own[1],) * 2), own[2])
        assert torch.allclose(shift, expected, atol=1e-5)


def test_layout_tells_tokens_and_their_runs_in_order():
    assert LAYOUT.sample_run.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert LAYOUT.rest_run.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert LAYOUT.sample_positions.tolist() == [12, 15, 18, 30, 50, 51, 52, 58, 59]
    kept = LAYOUT.keep_rest(torch.tensor([True, False, True, False, False, False, True]))
    assert (kept.rest_run.tolist(), kept.rest_positions.tolist()) == ([0, 0, 1], [10, 13, 60])
    gone = LAYOUT.keep_rest(LAYOUT.rest_run == 1)
    for estimator in ESTIMATORS:
        reused = ReusedKV((random_kv(NUM_SAMPLED, 1),) * 2, (random_kv(2, 2),) * 2)
        assert bool(shifts_of(estimator, gone, reused, random_kv(NUM_SAMPLED)).isfinite().all())


@pytest.mark.parametrize("shrink", [True, False])
def test_constant_drift_of_values_is_taken_away_exactly(shrink):
    drift, reused, rest = random_kv(2, 1), random_kv(NUM_SAMPLED, 2), random_kv(NUM_REST, 3)
    new = reused + by_run(drift, LAYOUT.sample_run)
    _, values = corrected(DriftCorrection(MeanShift(shrink)), new, reused, rest)
    assert torch.allclose(values, rest + by_run(drift, LAYOUT.rest_run), atol=1e-5)


@pytest.mark.parametrize("frame", KeyFrame)
@pytest.mark.parametrize("drift_frame", KeyFrame)
def test_constant_drift_of_keys_is_taken_away_in_the_frame_where_it_is_constant(frame, drift_frame):
    drift, reused, rest = random_kv(2, 1), random_kv(NUM_SAMPLED, 2), random_kv(NUM_REST, 3)
    moved, expected = by_run(drift, LAYOUT.sample_run), by_run(drift, LAYOUT.rest_run)
    if drift_frame is KeyFrame.COMMON:
        moved, expected = rotate(moved, LAYOUT.sample_positions), rotate(expected, LAYOUT.rest_positions)
    correction = DriftCorrection(MeanShift(shrink=False), frame)
    keys, _ = corrected(correction, reused + moved, reused, rest)
    assert torch.allclose(keys, rest + expected, atol=1e-5) is (frame is drift_frame)


def test_layer_without_rope_has_one_frame():
    drift, reused, rest = random_kv(2, 1), random_kv(NUM_SAMPLED, 2), random_kv(NUM_REST, 3)
    new = reused + by_run(drift, LAYOUT.sample_run)
    keys, _ = corrected(DriftCorrection(MeanShift(), KeyFrame.COMMON), new, reused, rest, None)
    assert torch.allclose(keys, rest + by_run(drift, LAYOUT.rest_run), atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("frame", KeyFrame)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_did_not_move_corrects_nothing(estimator, frame, dtype):
    """A pass that runs again after a failure measures nothing: it must not correct twice."""
    new, rest = random_kv(NUM_SAMPLED, 2, dtype), random_kv(NUM_REST, 3, dtype)
    keys, values = corrected(DriftCorrection(estimator, frame), new, new.clone(), rest)
    assert torch.equal(keys, rest)
    assert torch.equal(values, rest)


def test_sum_is_formed_in_float32_and_rounded_once():
    reused, rest = random_kv(NUM_SAMPLED, 2, torch.bfloat16), random_kv(NUM_REST, 3, torch.bfloat16)
    new = (reused.float() + 0.37).to(torch.bfloat16)
    _, values = corrected(DriftCorrection(MeanShift(shrink=False)), new, reused, rest)
    moved = new.double() - reused.double()
    means = torch.stack([moved[:4].mean(0), moved[4:].mean(0)])
    assert values.dtype is torch.bfloat16
    assert torch.equal(values, (rest.double() + means[LAYOUT.rest_run]).to(torch.bfloat16))


def mean_shift_oracle(moved, sample_run, rest_run):
    """Run by run and head by head, as the formula reads."""
    shifts = np.zeros((len(rest_run), *moved.shape[1:]))
    for token, run in enumerate(rest_run):
        for head in range(moved.shape[1]):
            sample = moved[sample_run == run, head].astype(np.float64)
            mean = sample.mean(0)
            noise = sample.var(0, ddof=1).sum() / len(sample)
            signal = max(0.0, float((mean**2).sum() - noise))
            shifts[token, head] = mean * signal / (signal + noise) if signal else 0.0
    return shifts


@given(
    sizes=st.lists(st.tuples(st.integers(2, 7), st.integers(1, 4)), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
@settings(max_examples=50)
def test_mean_shift_is_the_formula(sizes, seed, scale):
    rng = np.random.default_rng(seed)
    sample_run = np.repeat(np.arange(len(sizes)), [size for size, _ in sizes])
    rest_run = np.repeat(np.arange(len(sizes)), [rest for _, rest in sizes])
    offset = rng.normal(size=(len(sizes), HEADS, DIM))[sample_run]
    moved = (scale * (offset + rng.normal(size=(len(sample_run), HEADS, DIM)))).astype(np.float32)
    layout = RunLayout(*(torch.from_numpy(x) for x in (sample_run, rest_run, sample_run, rest_run)), len(sizes))
    shift = shifts_of(MeanShift(), layout, None, torch.from_numpy(moved)).numpy()
    assert np.allclose(shift, mean_shift_oracle(moved, sample_run, rest_run), atol=1e-4 * scale)


def test_noise_without_drift_is_shrunk_away():
    """What remains of the mean of noise is small beside the mean itself, in most heads nothing."""
    layout = RunLayout(*(torch.zeros(n, dtype=torch.int64) for n in (6, 1, 6, 1)), 1)
    left, raw = 0.0, 0.0
    for seed in range(200):
        moved = random_kv(6, seed)
        left += float(shifts_of(MeanShift(), layout, None, moved).square().sum())
        raw += float(shifts_of(MeanShift(shrink=False), layout, None, moved).square().sum())
    assert left < 0.1 * raw


@pytest.mark.parametrize("estimator", [*ESTIMATORS, KernelRidge(across=0.5)])
def test_runs_share_their_estimate_only_if_they_are_computed_together(estimator):
    reused = [random_kv(NUM_SAMPLED, 1), random_kv(NUM_REST, 2)]
    facts = ReusedKV((reused[0], reused[0]), (reused[1], reused[1]))
    moved = random_kv(NUM_SAMPLED)
    shift = shifts_of(estimator, LAYOUT, facts, moved)
    spoilt = moved.clone()
    spoilt[4:] = 100.0
    spoilt_facts = ReusedKV((torch.cat([reused[0][:4], spoilt[4:]]), reused[0]), facts.rest)
    other = shifts_of(estimator, LAYOUT, spoilt_facts, spoilt)
    assert torch.allclose(other[:5], shift[:5], atol=1e-5) is not estimator.pools_runs
    assert not torch.allclose(other[5:], shift[5:])


def kernel_ridge_oracle(estimator, layout, facts, moved):
    """Token by token, in float64, and by solving the whole system."""
    run = [*layout.sample_run.tolist(), *layout.rest_run.tolist()]
    at = [*layout.sample_positions.tolist(), *layout.rest_positions.tolist()]
    pairs = zip(facts.sample, facts.rest, strict=True)
    is_repeat = [False] * len(run)
    if layout.sample_repeats is not None:
        is_repeat = [*layout.sample_repeats.tolist(), *layout.rest_repeats.tolist()]
    states = [np.concatenate([s.numpy(), r.numpy()]).reshape(len(run), -1).astype(np.float64) for s, r in pairs]

    def cosine(i, j):
        total = 0.0
        for state in states:
            a = state[i] - state[[r == run[i] for r in run]].mean(0)
            b = state[j] - state[[r == run[j] for r in run]].mean(0)
            total += a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        return max(0.0, total / 2)

    def kernel(i, j):
        like = cosine(i, j) ** 2
        near = estimator.near * np.exp(-abs(at[i] - at[j]) / estimator.reach)
        if is_repeat[i] or is_repeat[j]:
            near = estimator.twice if is_repeat[i] and is_repeat[j] else 0.0
        own = estimator.const + near + estimator.like * like
        return (own if run[i] == run[j] else 0.0) + estimator.across * like

    num = len(layout.sample_run)
    known = np.array([[kernel(i, j) for j in range(num)] for i in range(num)]) + estimator.noise * np.eye(num)
    cross = np.array([[kernel(i, j) for j in range(num)] for i in range(num, len(run))])
    solved = np.linalg.solve(known, moved.numpy().reshape(num, -1).astype(np.float64))
    return (cross @ solved).reshape(-1, *moved.shape[1:])


@pytest.mark.parametrize(
    "estimator",
    [
        KernelRidge(like=0.0),
        KernelRidge(like=3.0),
        KernelRidge(1.0, 0.5, 4.0, 1.0, 0.3, 2.0),
        KernelRidge(near=0.0, like=0.0),
    ],
)
@pytest.mark.parametrize("layout", [LAYOUT, SAID_TWICE], ids=["once", "twice"])
def test_kernel_ridge_is_the_formula(estimator, layout):
    sample, rest, moved = random_kv(NUM_SAMPLED, 1), random_kv(NUM_REST, 2), random_kv(NUM_SAMPLED, 3)
    facts = ReusedKV((sample, sample.flip(0)), (rest, rest.flip(0)))
    shift = shifts_of(estimator, layout, facts, moved)
    assert np.allclose(shift.numpy(), kernel_ridge_oracle(estimator, layout, facts, moved), atol=1e-5)


def test_repeats_get_nearly_the_mean_of_those_sampled_and_others_what_they_get_without():
    other = DriftRun(np.arange(40, 60, 2), np.arange(41, 60, 2))
    all_twice = DriftRun(np.arange(10, 30, 2), np.arange(11, 30, 2), np.arange(10, 30))
    once = DriftRun(all_twice.sample, all_twice.rest)
    layout, plain = (RunLayout.of((run, other), torch.device("cpu")) for run in (all_twice, once))
    moved = random_kv(20) + torch.tensor(3.0)
    found, without = (shifts_of(KernelRidge(), each, None, moved) for each in (layout, plain))
    mean = moved[:10].mean(0)
    assert (found[:10] - mean).norm() < 0.1 * mean.norm() * 10**0.5 < 0.3 * (without[:10] - mean).norm()
    assert torch.equal(found[10:], without[10:])


def test_layout_and_plan_say_what_is_repeated():
    assert SAID_TWICE.sample_repeats.tolist() == [True, True, *[False] * 7]
    kept = SAID_TWICE.keep_rest(torch.tensor([True, False, True, False, False, False, True]))
    assert (kept.rest_repeats.tolist(), kept.sample_repeats) == ([True, True, False], SAID_TWICE.sample_repeats)
    assert LAYOUT.sample_repeats is LAYOUT.rest_repeats is LAYOUT.keep_rest(LAYOUT.rest_run == 1).rest_repeats is None
    live = np.r_[:10, 70:80]
    context = SelectionContext(80, np.arange(10, 70), np.arange(60), live, repeats=np.arange(30, 50))
    sample = np.arange(10, 70, 4)
    plan = DriftPlan.of(context, np.union1d(live, sample), sample, np.zeros(80, bool), drift_correction("drift"))
    assert [run.repeats.tolist() for run in plan.runs] == [list(range(30, 50))]


def test_weights_by_positions_are_formed_once_for_all_layers(monkeypatch):
    formed = []

    def counted(self, layout, sample, rest, inner=KernelRidge._weights):
        formed.append(self.like)
        return inner(self, layout, sample, rest)

    monkeypatch.setattr(KernelRidge, "_weights", counted)
    layout = RunLayout.of(RUNS, torch.device("cpu"))
    correction = DriftCorrection(KernelRidge(like=0.0))
    for layer in range(3):
        new, reused, rest = random_kv(NUM_SAMPLED, layer), random_kv(NUM_SAMPLED, 5), random_kv(NUM_REST, 6)
        found = correction.corrected(layout, (new, new), (reused, reused), (rest, rest), ROPE)
        alone = RunLayout.of(RUNS, torch.device("cpu"))
        again = correction.corrected(alone, (new, new), (reused, reused), (rest, rest), ROPE)
        assert all(torch.equal(mine, other) for mine, other in zip(found, again, strict=True))
    assert len(formed) == 1 + 3, "once for three layers, and once for each layout of a single one"


def test_kernel_ridge_of_the_constant_alone_is_a_mean_shrunk_by_its_size():
    moved = random_kv(NUM_SAMPLED)
    zeros = (torch.zeros(NUM_SAMPLED, HEADS, DIM),) * 2, (torch.zeros(NUM_REST, HEADS, DIM),) * 2
    shift = shifts_of(KernelRidge(const=0.5, near=0.0, like=0.0, noise=1.5), LAYOUT, ReusedKV(*zeros), moved)
    assert torch.allclose(shift[0], moved[:4].mean(0) * 4 / (4 + 3), atol=1e-6)
    assert torch.allclose(shift[6], moved[4:].mean(0) * 5 / (5 + 3), atol=1e-6)


def test_corrections_have_names():
    assert drift_correction("none") is None
    assert drift_correction("drift") is CORRECTIONS["drift"]
    with pytest.raises(ConfigError, match="choose none, drift"):
        drift_correction("shift")
    for wrong in ({"near": -1}, {"noise": 0}, {"reach": 0}):
        with pytest.raises(ConfigError, match="kernel ridge"):
            KernelRidge(**wrong)


@st.composite
def passes(draw):
    """Runs behind an exact prefix with gaps between them, rows of a pass, and a sample among these."""
    lengths = draw(st.lists(st.integers(1, MAX_RUN_ROWS), min_size=1, max_size=5))  # none is cut for its rows
    gaps = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    prefix_len, position, reused, distance = 3, 3, [], []
    for length, gap in zip(lengths, gaps, strict=True):
        position += gap
        reused.extend(range(position, position + length))
        distance.extend(range(length))
        position += length
    num_tokens = position + 5
    reused = np.array(reused)
    live = np.setdiff1d(np.arange(prefix_len, num_tokens), reused)
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    context = SelectionContext(num_tokens, reused, np.array(distance), live)
    computed = np.zeros(num_tokens, bool)
    computed[rng.permutation(reused)[: draw(st.integers(0, 10))]] = True
    fresh = reused[~computed[reused]]
    chosen = np.sort(rng.permutation(fresh)[: draw(st.integers(0, 60))])
    rows = np.union1d(live, chosen)
    sample = np.sort(rng.permutation(chosen)[: draw(st.integers(0, 60))])
    return context, rows, sample, computed


@given(
    given_pass=passes(), limit=st.integers(1, 30), estimator=st.sampled_from([MeanShift(), FromOneToken(across=0.2)])
)
@settings(max_examples=200)
def test_pass_is_cut_between_runs_and_every_run_is_corrected_once(given_pass, limit, estimator):
    context, rows, sample, computed = given_pass
    plan = DriftPlan.of(context, rows, sample, computed, DriftCorrection(estimator))
    start, found = 0, []
    while start < len(rows):
        stop = plan.cut(start, start + limit)
        assert start < stop <= len(rows)
        assert plan.cut(start, stop) == stop
        piece = plan.between(start, stop)
        for run in () if piece is None else piece.runs:
            low, high = min(run.sample[0], run.rest[0]), max(run.sample[-1], run.rest[-1]) + 1
            in_run = rows[(rows >= low) & (rows < high)]
            assert set(in_run) <= set(rows[start:stop])
            found.append(run)
        if estimator.pools_runs and piece is not None:
            assert len(piece.runs) == len(plan.runs)
        start = stop
    assert [run.sample.tolist() for run in found] == [run.sample.tolist() for run in plan.runs]
    assert_runs_are(plan.runs, context, rows, sample, computed, least_sample=estimator.least_sample)


def assert_runs_are(runs, context, rows, sample, computed, *, least_sample):
    """What an oracle that looks at tokens one by one would correct."""
    number = np.cumsum(np.isin(np.arange(len(context.reused)), context.run_starts)) - 1
    expected = []
    for run in range(number.max() + 1):
        tokens = context.reused[number == run]
        assert (np.diff(tokens) == 1).all()
        sampled = [t for t in tokens if t in sample and not computed[t]]
        rest = [t for t in tokens if t not in rows and not computed[t]]
        if len(sampled) >= least_sample and rest:
            expected.append((sampled, rest))
    assert [(run.sample.tolist(), run.rest.tolist()) for run in runs] == expected


def test_pass_without_a_sample_or_correction_is_cut_anywhere():
    context = SelectionContext(30, np.arange(5, 25), np.arange(20), np.r_[:5, 25:30])
    rows = np.arange(0, 30, 2)
    computed = np.zeros(30, bool)
    for sample, correction in ((rows[:0], DriftCorrection(MeanShift())), (rows[3:12], None)):
        plan = DriftPlan.of(context, rows, sample, computed, correction)
        assert [plan.cut(2, 2 + limit) for limit in range(1, 8)] == [3, 4, 5, 6, 7, 8, 9]
        assert plan.between(0, len(rows)) is None
    plan = DriftPlan.of(context, rows, rows[3:12], computed, DriftCorrection(MeanShift()))
    assert [plan.cut(2, 2 + limit) for limit in (1, 2, 9, 12)] == [3, 3, 3, 14]
    assert plan.cut(3, 4) == 12 + 1


def test_long_runs_are_corrected_in_parts_of_bounded_rows(monkeypatch):
    monkeypatch.setattr(drift_plan, "MAX_RUN_ROWS", 10)
    context = SelectionContext(220, np.arange(10, 210), np.arange(200), np.r_[:10, 210:220])
    sample = np.arange(10, 210, 4)
    rows = np.union1d(context.live, sample)
    plan = DriftPlan.of(context, rows, sample, np.zeros(220, bool), DriftCorrection(MeanShift()))
    assert [len(run.sample) for run in plan.runs] == [10] * 5
    assert np.concatenate([run.rest for run in plan.runs]).tolist() == sorted(
        set(range(10, 210)) - set(sample.tolist())
    )
    pieces = [0]
    while pieces[-1] < len(rows):
        pieces.append(plan.cut(pieces[-1], pieces[-1] + 1))
    assert max(np.diff(pieces)) == 10


@pytest.mark.parametrize(("k", "num_corrected"), [(4, 0), (7, 0), (8, 52), (16, 44)])
def test_runs_with_too_few_sampled_tokens_are_left_alone(k, num_corrected):
    """Of two runs, one is too short to have a rest; four heads of runs say too little of the others."""
    reused = np.r_[10:70, 80:84]
    context = SelectionContext(90, reused, np.r_[:60, :4], np.setdiff1d(np.arange(90), reused))
    step = next(FirstK(k).steps(context))
    rows = np.union1d(context.live, step.positions)
    plan = DriftPlan.of(context, rows, step.sample, np.zeros(90, bool), drift_correction("drift"))
    assert [len(run.rest) for run in plan.runs] == ([num_corrected] if num_corrected else [])


@pytest.mark.parametrize("max_length", [1, 7, 50, 199, 200, 1000])
def test_long_runs_are_corrected_in_parts_of_bounded_length(max_length, monkeypatch):
    monkeypatch.setattr(drift_plan, "MAX_RUN_ROWS", 10)
    context = SelectionContext(220, np.arange(10, 210), np.arange(200), np.r_[:10, 210:220])
    sample = np.arange(10, 210, 4)
    rows = np.union1d(context.live, sample)
    correction = DriftCorrection(FromOneToken())
    plan = DriftPlan.of(context, rows, sample, np.zeros(220, bool), correction, max_length=max_length)
    for run in plan.runs:
        assert max(run.rest[-1], run.sample[-1]) - min(run.rest[0], run.sample[0]) < max_length
        assert len(run.sample) <= 10
    corrected = np.concatenate([run.rest for run in plan.runs]) if plan.runs else np.empty(0)
    assert len(corrected) == len(set(corrected.tolist()))
    assert len(corrected) == (0 if max_length == 1 else 150), "parts of 7 tokens have one that is sampled"
