"""The first vote after a failure on one rank is against: others meet it before the model's own collective operations."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from kvgraft.integrations.vllm.worker import key_deviation, passes, ranks, sparse_pass
from kvgraft.integrations.vllm.worker.decoder_stack import DecoderStack
from kvgraft.integrations.vllm.worker.virtual_batch import RowRuns
from kvgraft.reuse.together import FailedTogetherError

ROWS = np.arange(4)


class NoRoom(np.ndarray):
    """Tokens that do not fit on the device any more."""


@pytest.fixture
def votes(monkeypatch):
    """How deep in work this rank is when it says that it has failed."""
    taken = []

    def lowest(numbers):
        failed, here, *_ = numbers
        taken.extend([failed] if failed == here >> 32 else [])
        return numbers

    monkeypatch.setattr(ranks.together, "_lowest", lowest)
    monkeypatch.setattr(sparse_pass, "virtual_batch", lambda *_: nullcontext())
    monkeypatch.setattr(sparse_pass, "caches_bound", lambda *_: nullcontext())
    from_numpy = torch.from_numpy

    def onto_a_full_device(array):
        if isinstance(array, NoRoom):
            raise torch.OutOfMemoryError
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", onto_a_full_device)
    return taken


@pytest.fixture
def rank():
    def compute(**_):
        raise AssertionError("others would wait for this rank in the model")

    layer = SimpleNamespace(cache=torch.zeros(1))
    return sparse_pass.RankModel(None, compute, (SimpleNamespace(layers=[layer], builders=[]),))


def home():
    place = SimpleNamespace(read=lambda layer: (torch.zeros(4, 1, 1),) * 2)
    return SimpleNamespace(place=lambda rows: place, caches=(), table=None)


def test_tokens_that_do_not_reach_the_device_fail_before_the_vote_on_a_pass(votes, rank):
    tokens = np.zeros(4, np.int32).view(NoRoom)
    with pytest.raises(FailedTogetherError):
        ranks.together(lambda: rank.run(tokens, RowRuns.of(ROWS), [home()]))
    assert votes == [1]


def test_tokens_whose_keys_are_compared_too(votes, rank):
    tokens = np.zeros(4, np.int32).view(NoRoom)
    body = SimpleNamespace(embed_input_ids=rank.model)
    prompt = passes.GraftedPrompt(rank, tokens, [home()], None)
    observed = key_deviation.KeyDeviationPass(prompt, ROWS, DecoderStack(body, None), reused=ROWS)
    with pytest.raises(FailedTogetherError):
        ranks.together(lambda: observed._run(ROWS))
    assert votes == [1]
