"""A step that stores are shown has everything of it but the requests that are withheld."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

from kvgraft.integrations.vllm.withheld import shown_to_stores


@dataclass
class Running:
    """vLLM's CachedRequestData: lists run beside `req_ids`."""

    req_ids: list
    resumed_req_ids: set
    new_token_ids: list
    all_token_ids: dict
    new_block_ids: list
    num_computed_tokens: list


@dataclass
class BlockState:
    req_ids: set
    boundary_state_offloads: dict


@dataclass
class Step:
    """vLLM's SchedulerOutput, as far as it goes by request."""

    scheduled_new_reqs: list
    scheduled_cached_reqs: Running
    num_scheduled_tokens: dict
    total_num_scheduled_tokens: int
    preempted_req_ids: set | None = None
    scheduled_spec_decode_tokens: dict = field(default_factory=dict)
    scheduled_encoder_inputs: dict = field(default_factory=dict)
    finished_req_ids: set = field(default_factory=set)
    kv_connector_block_state: BlockState | None = None


def step(**fields):
    running = Running(["b", "c"], {"c"}, [], {"b": [1], "c": [2]}, [None, ([7],)], [40, 50])
    new = [SimpleNamespace(req_id="a"), SimpleNamespace(req_id="d")]
    blocks = BlockState({"a", "b", "c", "d"}, {"c": [1], "b": [2]})
    counts = {"a": 10, "b": 1, "c": 1, "d": 20}
    return Step(new, running, counts, 32, kv_connector_block_state=blocks, **fields)


def test_a_step_without_withheld_requests_is_shown_as_it_is():
    whole = step(preempted_req_ids={"e"})
    assert shown_to_stores(whole, {"x"}, set()) is whole


def test_withheld_requests_are_nowhere_in_it():
    whole = step(scheduled_spec_decode_tokens={"c": [1]}, scheduled_encoder_inputs={"a": [0], "b": [0]})
    before = asdict(whole)
    shown = shown_to_stores(whole, {"a", "c"}, set())
    assert asdict(whole) == before, "vLLM goes on with it"
    assert [new.req_id for new in shown.scheduled_new_reqs] == ["d"]
    assert shown.scheduled_cached_reqs == Running(["b"], set(), [], {"b": [1]}, [None], [40])
    assert (shown.num_scheduled_tokens, shown.total_num_scheduled_tokens) == ({"b": 1, "d": 20}, 21)
    assert (shown.scheduled_spec_decode_tokens, shown.scheduled_encoder_inputs) == ({}, {"b": [0]})
    assert shown.kv_connector_block_state == BlockState({"b", "d"}, {"b": [2]})


def test_stores_hear_that_a_request_of_theirs_lost_its_blocks():
    """Saves of what they were told before may be under way."""
    shown = shown_to_stores(step(preempted_req_ids={"a", "b", "e"}), {"a", "e"}, {"e"})
    assert shown.preempted_req_ids == {"b", "e"}
