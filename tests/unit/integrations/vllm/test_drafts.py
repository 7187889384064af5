"""Drafts of speculative decoding: what may be rejected is neither captured nor counts as computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stand_ins import BLOCK, Engine, Request
from test_graft_scheduler import DOCUMENTS, make_graft

from kvgraft.integrations.vllm.scheduler.pending_blocks import PendingBlocks


@pytest.mark.parametrize(("drafts", "captured"), [(0, [(70, 78)]), (4, [])])
def test_answers_are_captured_up_to_the_last_token_that_is_certain(drafts, captured):
    """Eight tokens are captured at a time: the step computes the eighth, or drafts that stand there."""
    engine = Engine(make_graft("sync"))
    request = Request("one", DOCUMENTS[0], {"kvgraft": "exact"}, 100)
    engine.add(request)
    while request.computed < 70 + 8 - 1 - drafts:
        engine.step(room=True, chunk=400)
    output = engine.output_of([request])
    output.num_scheduled_tokens["one"] = 1 + drafts
    output.scheduled_spec_decode_tokens["one"] = [7] * drafts
    captures = engine.graft.commands(output).captures
    assert [(capture.start, capture.stop) for capture in captures] == captured


def test_blocks_behind_a_rejected_draft_are_evicted_with_those_that_were_never_computed():
    """The step that follows publishes a block, and vLLM may preempt the request before that step runs."""
    named = {}
    pool = SimpleNamespace(
        get_cached_block=lambda key, groups: [SimpleNamespace(block_id=key)] if key in named else None,
        evict_blocks=lambda keys: [named.pop(key) for key in keys],
    )
    pending = PendingBlocks([BLOCK], BLOCK, steps_under_way=1)
    pending.bind(SimpleNamespace(block_pool=pool))
    request = Request("one", [*range(BLOCK - 2)], None, 9)
    pending.admit(request, 0, loads=False)
    pending.step_scheduled(output_of(new=0, count=BLOCK - 2))
    request.extend([1])
    pending.step_scheduled(
        output_of(computed=BLOCK - 2, count=5, drafts=4)
    )  # all are rejected but the token before them
    request.extend([2])
    named[request.block_hashes[0]] = True  # vLLM schedules the block's last token, and takes it back
    output = output_of()
    output.preempted_req_ids = {"one"}
    pending.step_scheduled(output)
    assert not named


def output_of(*, new=None, computed=None, count=0, drafts=0):
    """A step of one request, which is new in it or runs."""
    is_new, is_running = new is not None, computed is not None
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="one", num_computed_tokens=new)] * is_new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["one"] * is_running, num_computed_tokens=[computed] * is_running
        ),
        num_scheduled_tokens={"one": count} if count else {},
        scheduled_spec_decode_tokens={"one": [7] * drafts} if drafts else {},
        preempted_req_ids=set(),
    )
