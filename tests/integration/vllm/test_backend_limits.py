"""What backends of a GPU limit: how large a block is, how many runs a pass may have, and how much memory they take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from engines import engine, text
from kvgraft.graft.select import FirstK
from kvgraft.integrations.vllm.worker import layers
from kvgraft.integrations.vllm.worker.virtual_batch import RowRuns

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
PROMPT = OTHER_HEAD + DOCUMENT[:350] + text(6, 30) + DOCUMENT[350:] + OTHER_QUESTION


@pytest.fixture(params=["llama", "gemma3"])
def split(request, model_folder):
    """Blocks of 128 tokens, of which the backend makes four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(lambda spec=None: [32]))
        with engine(model_folder, request.param, block_size=128, num_gpu_blocks_override=200) as one:
            one.ask(text(9, 20), "off", max_tokens=1)
            yield one


def test_blocks_of_the_backend_may_be_smaller_than_vllms(split, monkeypatch):
    assert split.worker.refusal == ""
    assert {group.split for group in split.worker._groups} == {4}
    assert {group.block_size for group in split.worker._groups} == {32}
    cold = split.cold(PROMPT)
    split.donate(HEAD + DOCUMENT + QUESTION)
    assert split.ask(PROMPT).shifted > 500
    split.llm.reset_prefix_cache()
    split.forget_donors()
    split.donate(HEAD + DOCUMENT + QUESTION)
    monkeypatch.setattr(split.worker, "_policy", FirstK(100_000))
    warm = split.ask(PROMPT, repair="before")
    assert warm.report["recomputed_tokens"] == len(DOCUMENT)
    warm.assert_like(cold)
    split.check()


class Limited:
    """A builder with room for so many requests, as FlashInfer's has."""

    def __init__(self, builder, max_num_reqs):
        self._builder = builder
        self.max_num_reqs = max_num_reqs
        self.seen = []

    def build(self, common_prefix_len, common_attn_metadata):
        self.seen.append(common_attn_metadata.num_reqs)
        if common_attn_metadata.num_reqs > self.max_num_reqs:
            raise ValueError("the buffer of page indices is full")
        return self._builder.build(common_prefix_len=common_prefix_len, common_attn_metadata=common_attn_metadata)


@pytest.mark.parametrize("selection", ["random", "query_seam"])
def test_a_pass_has_no_more_runs_than_the_backend_has_room_for(model_folder, monkeypatch, selection):
    made = []

    def limited(*args):
        (builder, names), *_ = original(*args)
        made.append(Limited(builder, 5))
        return ((made[-1], names),)

    original = layers._builders
    monkeypatch.setattr(layers, "_builders", limited)
    options = {"selection": selection, "recompute_ratio": 0.1}
    with engine(model_folder, "llama", options=options, num_gpu_blocks_override=100) as served:
        served.donate(HEAD + DOCUMENT + QUESTION)
        assert served.worker.refusal == ""
        for repair in ("before", "after"):
            answer = served.ask(PROMPT, repair=repair)
            assert answer.report["miss"] is None
            assert answer.report["recomputed_tokens"] >= 70
            assert served.scheduler.counts.num_errors == 0
            served.llm.reset_prefix_cache()
    assert max(made[0].seen) == 5


def test_rows_are_cut_at_a_run():
    rows = torch.tensor([3, 4, 5, 9, 12, 13, 20]).numpy()
    assert [RowRuns.within(rows, most) for most in (1, 2, 3, 4, 9, None)] == [3, 4, 6, 7, 7, 7]
    assert RowRuns.within(rows[:0], 4) == 0


def test_a_pass_has_no_more_rows_than_a_step_of_the_engine(model_folder):
    with engine(model_folder, "llama", max_num_batched_tokens=96, num_gpu_blocks_override=100) as served:
        served.ask(text(9, 20), "off", max_tokens=1)
        assert served.worker._rank.most_rows == 96


def test_builders_share_one_workspace():
    def builder(number):
        own = SimpleNamespace(workspace=None)
        own._get_workspace_buffer = lambda: torch.full((1 << 20,), number, dtype=torch.uint8)
        own.set_workspace_buffer = lambda given: setattr(own, "workspace", given)
        return own

    first, second, plain = builder(1), builder(2), SimpleNamespace()
    layers._share_workspace([plain, first, second])
    assert first.workspace is None
    assert second.workspace[0] == 1
    layers._share_workspace([plain])
