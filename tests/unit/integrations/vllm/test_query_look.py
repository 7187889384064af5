"""A look at what a query attends to, on a decoder of plain tensors whose attention layers stand in for vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.worker.query_look import QueryLook, attention_rule

HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 4, 2, 6, 16, 50
NUM_TOKENS, END = 60, 41
"""Of a prompt, and of its last copy."""
WINDOWS = (0, 8, 0)
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, NUM_TOKENS, dtype=np.int32)


class PagedAttention(nn.Module):
    """As vLLM's `Attention`: stores K/V of its rows, then attends by a cache."""

    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, DIM

    def __init__(self, window, softcap):
        super().__init__()
        self.sliding_window = window or None
        self.impl = SimpleNamespace(scale=0.7, logits_soft_cap=softcap, alibi_slopes=None, sinks=None)
        self.cache = torch.zeros(2, NUM_TOKENS, KV_HEADS, DIM)
        self.rows = None

    def forward(self, query, key, value):
        rows = self.rows
        self.cache[:, rows] = torch.stack([key.view(-1, KV_HEADS, DIM), value.view(-1, KV_HEADS, DIM)])
        return dense(self, query.view(-1, HEADS, DIM), rows)[0].flatten(1)


class Decoder(nn.Module):
    def __init__(self, softcap):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.ModuleList(nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM) for _ in WINDOWS)
        self.out = nn.ModuleList(nn.Linear(HEADS * DIM, WIDTH) for _ in WINDOWS)
        self.attention = nn.ModuleList(PagedAttention(window, softcap) for window in WINDOWS)

    def forward(self, input_ids, positions):
        hidden = self.embed(input_ids) + torch.sin(positions[:, None] * torch.arange(WIDTH))
        for project, attention, out in zip(self.project, self.attention, self.out, strict=True):
            query, key, value = project(hidden).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
            hidden = hidden + out(attention(query, key, value=value))
        return hidden


def dense(layer, query, rows):
    """Outputs and weights `(rows, heads, NUM_TOKENS)` of rows against a layer's cache."""
    keys, values = layer.cache.repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("rhd,khd->rhk", query, keys) * layer.impl.scale
    if layer.impl.logits_soft_cap:
        scores = layer.impl.logits_soft_cap * torch.tanh(scores / layer.impl.logits_soft_cap)
    key, row = torch.arange(NUM_TOKENS), torch.as_tensor(rows)[:, None]
    hidden = key > row
    if layer.sliding_window:
        hidden = hidden | (key <= row - layer.sliding_window)
    weights = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1)
    return torch.einsum("rhk,khd->rhd", weights, values), weights


class Home:
    """One group of all layers; a position's slot is its number."""

    def __init__(self, model):
        self.layers = range(len(WINDOWS))
        self.group = SimpleNamespace(
            layers=[SimpleNamespace(module=module, scales=(1.0, 1.0)) for module in model.attention]
        )

    def place(self, positions):
        modules = self.group.layers
        return SimpleNamespace(read=lambda layer: modules[layer].module.cache[:, positions].clone().unbind())


class Rank:
    """`RankModel`, as far as a look goes."""

    device = torch.device("cpu")

    def __init__(self, softcap=0.0):
        self.model = Decoder(softcap)
        self.num_ends = 0

    def run(self, rows):
        """With the backend's attention."""
        for layer in self.model.attention:
            layer.rows = rows
        self.model(torch.from_numpy(TOKENS[rows]), torch.from_numpy(rows))
        self.num_ends += 1  # a rank that left the model half-way would let others wait in its all-reduce


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


GAPS = np.array([4, 5, 6, 20, 21, 22, 23, 35])


def grafted(rank):
    """Fill the caches in front of `END` with K/V that no model computed, except in gaps."""
    for layer in rank.model.attention:
        layer.cache[:, :END] = torch.randn(2, END, KV_HEADS, DIM, generator=torch.Generator().manual_seed(5))


def masses_by_definition(rank, query):
    """What hooks of our own see while the backend's attention runs the gaps and then what stands behind the graft."""
    mass = torch.zeros(NUM_TOKENS)

    def seen(layer, args, kwargs, output):
        del kwargs, output
        _, weights = dense(layer, args[0].view(-1, HEADS, DIM), layer.rows)
        mass.add_(weights[np.isin(layer.rows, query)].sum((0, 1)))

    handles = [layer.register_forward_hook(seen, with_kwargs=True) for layer in rank.model.attention]
    for rows in (GAPS, np.arange(END, NUM_TOKENS)):
        rank.run(rows)
    for handle in handles:
        handle.remove()
    return mass


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("num_query", [1, 7, NUM_TOKENS - END + 3])
@pytest.mark.parametrize("piece", [1, 4, 100])
@pytest.mark.parametrize("observes_at_once", [False, True])
def test_masses_are_those_of_one_pass_over_the_grafted_prompt(num_query, piece, softcap, observes_at_once):
    """Whether a query's row lies in a gap or behind the graft, however the rows are cut, and whenever they are observed."""
    behind = np.arange(END, NUM_TOKENS)
    query = np.concatenate([GAPS, behind])[-num_query:]
    reference = Rank(softcap)
    grafted(reference)
    expected = masses_by_definition(reference, query)

    rank = Rank(softcap)
    grafted(rank)
    homes = [Home(rank.model)]
    look = QueryLook(rank, homes, query, NUM_TOKENS)
    for part in (GAPS, behind):
        for start in range(0, len(part), piece):
            rows = part[start : start + piece]
            with look.watching(rows):
                rank.run(rows)
            if observes_at_once:
                look.observe(homes)
    before = [layer.cache.clone() for layer in rank.model.attention]
    look.observe(homes)
    torch.testing.assert_close(look.mass, expected)
    assert look.mass.sum() == pytest.approx(num_query * HEADS * len(WINDOWS), rel=1e-4)
    for number, layer in enumerate(rank.model.attention):
        assert torch.equal(layer.cache, before[number]), "a look writes nothing"
        assert not layer._forward_hooks
    look.observe(homes)
    torch.testing.assert_close(look.mass, expected)  # what was observed is not observed again


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_the_backend_gives_is_compared_with_what_is_formed_here(softcap):
    rank = Rank(softcap)
    grafted(rank)
    look = QueryLook(rank, [Home(rank.model)], GAPS, NUM_TOKENS)
    with look.comparing([Home(rank.model)], GAPS) as found:
        rank.run(GAPS)
    assert len(found) == len(WINDOWS)
    for backend, formed in found:
        torch.testing.assert_close(backend, formed)
    rank.model.attention[1].impl.scale *= 1.1
    look = QueryLook(rank, [Home(rank.model)], GAPS, NUM_TOKENS)
    rank.model.attention[1].impl.scale /= 1.1  # the backend attends otherwise than the layer said
    with look.comparing([Home(rank.model)], GAPS) as found:
        rank.run(GAPS)
    assert [torch.allclose(*pair, atol=1e-5) for pair in found] == [True, False, True]


def test_what_stands_behind_a_row_is_not_seen():
    """K/V behind the query's only row change nothing; those in front of it do."""
    row = np.array([20])

    def mass_with(position):
        rank = Rank()
        grafted(rank)
        for layer in rank.model.attention:
            layer.cache[:, position] += 3.0
        homes = [Home(rank.model)]
        look = QueryLook(rank, homes, np.array([20, 40]), NUM_TOKENS)
        with look.watching(row):
            rank.run(row)
        look.observe(homes)
        return look.mass

    assert torch.equal(mass_with(21), mass_with(30))
    assert not torch.equal(mass_with(21), mass_with(19))


def test_a_rank_that_fails_in_a_layer_finishes_the_pass_with_the_others(monkeypatch):
    rank = Rank()
    look = QueryLook(rank, [Home(rank.model)], GAPS, NUM_TOKENS)

    def fails(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(QueryLook, "_keep", fails)
    with pytest.raises(RuntimeError, match="injected"), look.watching(GAPS):
        rank.run(GAPS)
    assert rank.num_ends == 1
    assert not any(module._forward_hooks for module in rank.model.attention)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alibi_slopes": torch.ones(2)}, "ALiBi"),
        ({"sinks": torch.ones(2)}, "attention sinks"),
        ({"scale": None}, "no scale"),
    ],
)
def test_layers_that_attend_otherwise_are_refused_in_one_line(change, words):
    module = PagedAttention(0, 0.0)
    vars(module.impl).update(change)
    with pytest.raises(IntegrationError, match=f"{words}.*use selection='first_k'"):
        attention_rule(module)


def test_layers_that_share_keys_are_refused():
    module = PagedAttention(0, 0.0)
    module.kv_sharing_target_layer_name = "layers.3"
    with pytest.raises(IntegrationError, match="K/V of another layer"):
        attention_rule(module)
