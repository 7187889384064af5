"""Facts about GPU backends and Model Runner V2 that cannot be imported here: read off the installed vLLM's source."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm


@pytest.fixture
def source():
    return lambda name: (Path(vllm.__file__).parent / name).read_text(encoding="utf-8")


def test_flashinfer_has_room_for_as_many_requests_as_it_says(source):
    code = source("v1/attention/backends/flashinfer.py")
    assert "self.max_num_reqs = max_num_reqs" in code
    assert "max_num_reqs = vllm_config.scheduler_config.max_num_seqs" in code
    assert "max_num_reqs + 1, dtype=torch.int32, device=self.device" in code


def test_builders_with_a_workspace_can_share_it_as_vllms_runner_has_them(source):
    code = source("v1/worker/gpu/attn_utils.py")
    assert code.index("builder._get_workspace_buffer()") < code.index("builder.set_workspace_buffer(")


def test_v2_begins_loads_that_nobody_waits_for_after_sampling(source):
    driver = source("v1/worker/gpu/kv_connector.py").split("class ActiveKVConnector", 1)[1]
    before, after = driver.split("def post_forward", 1)
    assert "if scheduler_output.has_sync_kv_loads:" in before
    order = [after.index(call) for call in ("_start_load_kv()", "wait_for_save()", "get_block_ids_with_load_errors()")]
    assert order == sorted(order)
    runner = source("v1/worker/gpu/model_runner.py")
    assert runner.index("def sample_tokens(") < runner.index("self.kv_connector.post_forward(finished_req_ids)")


def test_v2_is_not_told_that_a_running_request_is_set_back(source):
    """Once it is (vllm#49250), `takes_running_back` may say so."""
    runner = source("v1/worker/gpu/model_runner.py")
    update = runner.split("def update_requests(", 1)[1].split("\n    def ", 1)[0]
    assert "num_computed_tokens_np[req_index] = num_computed_tokens" in update
    assert "num_computed_tokens.stage_write_elem" not in update


def test_the_configuration_says_which_runner_it_is():
    from vllm.config import VllmConfig

    assert isinstance(vars(VllmConfig)["use_v2_model_runner"], property)
