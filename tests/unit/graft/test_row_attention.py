"""Attention formed outside an engine's kernels: the embedded engine's, and a naive one row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.engine.attention.sequence import LayerInputs, SequenceAttention
from kvgraft.graft import row_attention
from kvgraft.graft.row_attention import AttentionRule, GatheredKV, QueryRows, attend, observe
from kvgraft.windows import SlidingWindow

HEADS, KV_HEADS, DIM, NUM_KEYS = 6, 2, 8, 70
SINKS = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 4.0])
RULES = [
    AttentionRule(0.4),
    AttentionRule(0.4, window=9),
    AttentionRule(0.9, softcap=1.5),
    AttentionRule(0.9, 20, 2.0),
    AttentionRule(0.9, 9, sinks=SINKS),
]
ROWS = np.array([3, 4, 5, 17, 40, 66, 69])


@pytest.fixture
def kv():
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(NUM_KEYS, KV_HEADS, DIM, generator=generator) for _ in range(2))
    return GatheredKV(torch.arange(NUM_KEYS), keys, values)


@pytest.fixture
def query():
    return torch.randn(len(ROWS), HEADS, DIM, generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=[1 << 24, 100])
def _scores_at_once(request, monkeypatch):
    monkeypatch.setattr(row_attention, "_MAX_SCORES", request.param)


def rows_of(query):
    return QueryRows(torch.from_numpy(ROWS[: len(query)]), query)


def naive(rule, query, kv):
    """Outputs, and the mass of each row by itself, from the definition."""
    outputs, masses = torch.zeros_like(query), torch.zeros(len(query), NUM_KEYS)
    for row, position in enumerate(ROWS):
        seen = range(max(0, position - rule.window + 1) if rule.window else 0, position + 1)
        for head in range(HEADS):
            own = head * KV_HEADS // HEADS
            scores = torch.stack([query[row, head] @ kv.keys[key, own] * rule.scale for key in seen])
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks[head, None]])
            weights = torch.softmax(scores, 0)[: len(seen)]
            masses[row, seen] += weights
            outputs[row, head] = weights @ kv.values[seen, own]
    return outputs, masses


@pytest.mark.usefixtures("_scores_at_once")
@pytest.mark.parametrize("rule", RULES)
def test_rows_see_what_stands_in_front_of_them_and_in_their_window(rule, query, kv):
    outputs, masses = naive(rule, query, kv)
    mass = torch.zeros(NUM_KEYS + 5)
    torch.testing.assert_close(attend(rule, rows_of(query), kv, mass, 3), outputs)
    torch.testing.assert_close(mass[:NUM_KEYS], masses[-3:].sum(0))
    assert not mass[NUM_KEYS:].any()
    observe(rule, rows_of(query[:-3]), kv, mass)
    torch.testing.assert_close(mass[:NUM_KEYS], masses.sum(0))
    if rule.sinks is None:
        assert mass.sum() == pytest.approx(len(ROWS) * HEADS, rel=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_mass_is_what_the_embedded_engine_shows_to_its_policies(rule, query, kv):
    embedded = SequenceAttention(ROWS, torch.device("cpu"), observed_rows=5)
    by_head = (tensor.transpose(0, 1) for tensor in (query, kv.keys, kv.values))
    window = SlidingWindow(rule.window) if rule.window else None
    expected = embedded.attend(LayerInputs(*by_head, rule.scale, window, rule.softcap or None, rule.sinks))
    mass = torch.zeros(NUM_KEYS)
    actual = attend(rule, rows_of(query), kv, mass, 5)
    torch.testing.assert_close(actual.transpose(0, 1), expected)
    torch.testing.assert_close(mass, embedded.mass)


def test_scattered_keys_count_at_their_own_positions(query, kv):
    """Gathered keys need not begin at position 0, and mass falls on prompt positions."""
    part = GatheredKV(kv.positions[60:] + 100, kv.keys[60:], kv.values[60:])
    mass = torch.zeros(200)
    observe(AttentionRule(1.0), QueryRows(torch.tensor([165]), query[-1:]), part, mass)
    assert mass.nonzero().flatten().tolist() == list(range(160, 166))
