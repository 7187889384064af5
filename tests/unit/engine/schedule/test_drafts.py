"""Drafts: what fails in drawing a provisional token is no failure of the request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvgraft.engine.schedule.drafts import Drafts
from kvgraft.errors import NothingToDrawError, RequestError


class FailingSampler:
    def __init__(self, error):
        self.error = error

    def sample(self, logits):
        raise self.error


@pytest.mark.parametrize("error", [NothingToDrawError("no token"), RequestError("the structure cannot be followed")])
def test_a_draft_that_cannot_be_drawn_ends_the_drafts_alone(error):
    kv = SimpleNamespace(lineage=SimpleNamespace(exact_len=lambda num_tokens: 0), plan=SimpleNamespace(num_tokens=3))
    drafts = Drafts(kv, FailingSampler(error))
    assert not drafts.draft(torch.zeros(4))
    assert not drafts.may_go_on
    assert drafts.token_ids == []
