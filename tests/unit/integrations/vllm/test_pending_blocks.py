"""Blocks that another connector loads: nobody is given them before it is certain that the load has not failed.

`tests/integration/vllm/test_pending_blocks.py` asks vLLM's own manager about the others.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvgraft.integrations.vllm.scheduler.pending_blocks import HitState, PendingBlocks

BLOCK = 16


class Manager:
    """One request has blocks, all of which are public: number and hash are the same."""

    def __init__(self):
        self.public = set(range(4))
        self.block_pool = SimpleNamespace(
            get_cached_block=lambda block_hash, groups: (
                [self._block(block_hash)] if block_hash in self.public else None
            ),
            evict_blocks=self.evict_blocks,
        )

    def _block(self, number):
        return SimpleNamespace(block_id=number, is_null=False)

    def get_computed_blocks(self, request):
        del request
        return SimpleNamespace(blocks=([self._block(number) for number in sorted(self.public)],)), 0

    def get_blocks(self, request_id):
        del request_id
        return SimpleNamespace(blocks=([self._block(number) for number in range(4)],))

    def evict_blocks(self, block_ids):
        self.public -= block_ids


class Loading:
    """A request that had one block, and loads two."""

    request_id = "loads"
    block_hashes = tuple(range(4))
    num_computed_tokens = 0

    def __init__(self, steps_under_way):
        self.manager = Manager()
        self.pending = PendingBlocks([BLOCK], BLOCK, steps_under_way=steps_under_way)
        self.pending.bind(self.manager)
        self.pending.admit(self, BLOCK, loads=True)
        self.step(3 * BLOCK, new=True)

    def step(self, computed, *, new=False, preempted=()):
        """A step that computes a block from position `computed` on."""
        rows = [SimpleNamespace(req_id="loads", num_computed_tokens=computed)] if not preempted else []
        cached = [] if new else rows
        self.pending.step_scheduled(
            SimpleNamespace(
                scheduled_new_reqs=rows if new else [],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[row.req_id for row in cached],
                    num_computed_tokens=[row.num_computed_tokens for row in cached],
                ),
                num_scheduled_tokens={"loads": BLOCK},
                scheduled_spec_decode_tokens={},
                preempted_req_ids=set(preempted),
            )
        )
        self.num_computed_tokens = computed + BLOCK

    @property
    def hit(self):
        return self.pending.hit_of(SimpleNamespace(request_id="other"))


@pytest.mark.parametrize("steps_under_way", [1, 2])
def test_a_load_is_waited_for_until_it_is_known_not_to_have_failed(steps_under_way):
    loading = Loading(steps_under_way)
    assert loading.hit is (HitState.COMPUTED if steps_under_way == 1 else HitState.OWED)
    loading.step(4 * BLOCK)
    assert loading.hit is HitState.COMPUTED


def test_in_the_step_of_the_load_it_is_not_known():
    loading = Loading(1)
    loading.pending.admit(loading, BLOCK, loads=True)
    assert loading.hit is HitState.OWED


def test_what_a_failed_load_left_is_waited_for_until_it_is_computed():
    loading = Loading(1)
    for computed in (BLOCK, 2 * BLOCK, 3 * BLOCK):
        loading.num_computed_tokens = computed
        assert loading.hit is HitState.OWED
        loading.step(computed)
    assert loading.hit is HitState.COMPUTED


def test_what_a_failed_load_left_goes_with_its_request():
    loading = Loading(1)
    loading.num_computed_tokens = 2 * BLOCK
    loading.pending.end("loads")
    assert loading.manager.public == {0, 1}


def test_what_a_failed_load_left_goes_with_a_preemption():
    loading = Loading(1)
    loading.num_computed_tokens = 0
    loading.step(0, preempted=["loads"])
    assert loading.manager.public == {0}


def test_a_question_that_failed_half_way_is_asked_anew(monkeypatch):
    """Blocks that were not noted would pass for computed ones in the same step, and a graft read what nobody has computed."""
    loading = Loading(2)
    with monkeypatch.context() as patch:
        patch.setattr(loading.manager, "get_blocks", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _ = loading.hit
    assert loading.hit is HitState.OWED
