"""Drift corrected in front of attention layers that stand in for vLLM's: the right tokens, once, or none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from kvgraft.graft.drift import CORRECTIONS, DriftCorrection
from kvgraft.graft.drift_estimate import MeanShift
from kvgraft.graft.drift_layout import DriftRun
from kvgraft.graft.model import DriftRuns
from kvgraft.integrations.vllm.worker.drift_pass import DriftPass

HEADS, DIM, NUM_TOKENS = 2, 4, 40
RUNS = (
    DriftRun(np.array([6, 9, 12, 14]), np.array([5, 7, 8, 10, 11, 13])),
    DriftRun(np.arange(20, 24), np.arange(24, 36)),
)
ROWS = np.concatenate([[2, 3], RUNS[0].sample, [17], RUNS[1].sample])
RAW = DriftCorrection(MeanShift(shrink=False))


class PagedAttention(nn.Module):
    """As vLLM's `Attention`: writes the K/V it is given, then attends to what lies in its cache; here, to the sum of it."""

    num_heads = num_kv_heads = HEADS
    head_size = DIM

    def __init__(self, dtype):
        super().__init__()
        self.cache = torch.zeros(2, NUM_TOKENS, HEADS, DIM, dtype=dtype)
        self.attended = None

    def forward(self, query, key, value):
        self.cache[:, ROWS] = torch.stack([key.view(-1, HEADS, DIM), value.view(-1, HEADS, DIM)]).to(self.cache.dtype)
        self.attended = self.cache.clone()
        return query


class Home:
    """One group of layers; a position's slot is its number."""

    def __init__(self, modules, first_layer, window=0):
        self.layers = range(first_layer, first_layer + len(modules))
        self.group = SimpleNamespace(layers=[SimpleNamespace(module=module) for module in modules])
        self.caches = [module.cache for module in modules]
        self._window = window

    def first_seen(self, row):
        return max(0, row - self._window + 1) if self._window else 0

    def place(self, positions):
        def cache(layer):
            return self.caches[layer - self.layers.start]

        def write(layer, keys, values):
            cache(layer)[:, positions] = torch.stack([keys, values])

        def stored(keys, values):
            return keys.to(self.caches[0].dtype), values.to(self.caches[0].dtype)

        return SimpleNamespace(
            read=lambda layer: cache(layer)[:, positions].clone().unbind(),
            write=write,
            layer=lambda _: SimpleNamespace(stored=stored),
        )


class Model:
    """Four layers that are called in another order than they are numbered: the second group's come first."""

    def __init__(self, window=0, dtype=torch.float32):
        self.modules = [PagedAttention(dtype) for _ in range(4)]
        one, two = self.modules[2:], self.modules[:2]
        self.homes = [Home(one, 0), Home(two, 2, window)]
        generator = torch.Generator().manual_seed(1)
        self.exact = [torch.randn(2, NUM_TOKENS, HEADS, DIM, generator=generator) for _ in self.modules]
        self.shifts = [torch.randn(2, len(RUNS), 1, HEADS, DIM, generator=generator) for _ in self.modules]

    def reuse(self):
        """Move every run in every layer by a shift of its own, in the model's first layer too."""
        for module, exact, shift in zip(self.modules, self.exact, self.shifts, strict=True):
            module.cache.copy_(exact)
            for number, run in enumerate(RUNS):
                module.cache[:, np.concatenate([run.sample, run.rest])] += shift[:, number].to(module.cache.dtype)

    def run(self):
        for module, exact in zip(self.modules, self.exact, strict=True):
            keys, values = exact[:, ROWS].flatten(2)
            module(keys, keys, value=values)

    def correct(self, correction=RAW):
        with DriftPass(self.homes, [None] * 4, ROWS, DriftRuns(correction, RUNS)).correcting():
            self.run()


def test_what_layers_attend_to_is_corrected_but_for_the_first_that_is_called():
    model = Model()
    model.reuse()
    before = [module.cache.clone() for module in model.modules]
    model.correct()
    first, *later = model.modules
    stays = np.setdiff1d(np.arange(NUM_TOKENS), ROWS)
    assert torch.equal(first.attended[:, stays], before[0][:, stays])
    for module, exact in zip(later, model.exact[1:], strict=True):
        torch.testing.assert_close(module.attended, exact, atol=1e-5, rtol=0)
        assert torch.equal(module.attended, module.cache)
    outside = np.setdiff1d(stays, np.concatenate([run.rest for run in RUNS]))
    for module, then in zip(model.modules, before, strict=True):
        assert torch.equal(module.cache[:, outside], then[:, outside])
    assert not any(module._forward_pre_hooks for module in model.modules)


def test_what_no_row_of_a_window_sees_is_left_alone_there():
    model = Model(window=3)
    model.reuse()
    reused = model.modules[1].cache.clone()
    model.correct()
    torch.testing.assert_close(model.modules[3].cache, model.exact[3], atol=1e-5, rtol=0)
    cache, exact = model.modules[1].cache, model.exact[1]
    torch.testing.assert_close(
        cache[:, 5:], exact[:, 5:], atol=1e-5, rtol=0
    )  # 6 is the first row of the run, 5 it sees
    assert not torch.equal(reused[:, 5], exact[:, 5])
    narrow = Model(window=1)
    narrow.reuse()
    narrow.correct()
    assert torch.equal(narrow.modules[1].cache[:, 5], reused[:, 5])
    torch.testing.assert_close(narrow.modules[1].cache[:, 6:], exact[:, 6:], atol=1e-5, rtol=0)


def test_window_that_sees_nothing_of_the_runs_but_their_rows():
    runs = (DriftRun(np.arange(6, 10), np.arange(2, 6)),)
    model = Model(window=1)
    model.reuse()
    before = model.modules[1].cache.clone()
    with DriftPass(model.homes, [None] * 4, np.arange(6, 10), DriftRuns(RAW, runs)).correcting():
        pass
    rows = np.arange(6, 10)
    with DriftPass(model.homes, [None] * 4, rows, DriftRuns(RAW, runs)).correcting():
        for module in model.modules:
            keys = torch.zeros(len(rows), HEADS * DIM)
            for hook in list(module._forward_pre_hooks.values()):
                hook(module, (keys, keys, keys), {})
    assert torch.equal(model.modules[1].cache, before)
    assert not torch.equal(model.modules[3].cache[:, 2:6], before[:, 2:6])


@pytest.mark.parametrize("correction", [RAW, CORRECTIONS["drift"]], ids=["mean", "ridge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pass_that_runs_again_corrects_nothing_twice(correction, dtype):
    model = Model(dtype=dtype)
    model.reuse()
    model.correct(correction)
    once = [module.cache.clone() for module in model.modules]
    model.correct(correction)
    for module, then in zip(model.modules, once, strict=True):
        assert torch.equal(module.cache, then)


def test_failure_is_told_behind_the_pass_and_corrects_nothing_more(monkeypatch):
    model = Model()
    model.reuse()
    before = [module.cache.clone() for module in model.modules]
    calls = []

    def fails_late(self, layout, moved, out, inner=MeanShift._shift):
        calls.append(1)
        if len(calls) == 4:  # values of the second layer that is corrected, after its keys
            raise MemoryError("no room")
        return inner(self, layout, moved, out)

    monkeypatch.setattr(MeanShift, "_shift", fails_late)
    with pytest.raises(MemoryError, match="no room"):
        model.correct()
    assert all(module.attended is not None for module in model.modules), "other ranks wait for this one in the model"
    rest = np.concatenate([run.rest for run in RUNS])
    assert not torch.equal(model.modules[1].cache[:, rest], before[1][:, rest])
    for module, then in zip(model.modules[2:], before[2:], strict=True):
        assert torch.equal(module.cache[:, rest], then[:, rest])
    assert not any(module._forward_pre_hooks for module in model.modules)
