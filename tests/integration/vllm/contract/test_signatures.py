"""What the connector was written against, in the vLLM that is installed. A difference here explains every other failure."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest
import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched import output as sched_output
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvgraft.integrations.vllm import GraftConnector, GraftMultiConnector
from kvgraft.integrations.vllm.versions import TESTED_VERSIONS

INSTALLED = vllm.__version__


def parameters(function):
    return list(inspect.signature(function).parameters)


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_this_version_is_listed_as_tested():
    assert INSTALLED in TESTED_VERSIONS


def test_everything_abstract_is_implemented():
    assert not GraftConnector.__abstractmethods__


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in (GraftConnector, GraftMultiConnector)
        for name, member in vars(kind).items()
        if callable(getattr(member, "__func__", member))
        and not name.startswith("_")
        and hasattr(base.KVConnectorBase_V1, name)
    ],
)
def test_overridden_methods_take_what_vllm_passes(kind, name):
    ours, theirs = getattr(kind, name), getattr(base.KVConnectorBase_V1, name)
    assert parameters(ours) == parameters(theirs)


def test_vllms_multi_connector_has_what_ours_is_built_on():
    code = inspect.getsource(MultiConnector)
    for name in ("_connectors", "_requests_to_connector", "_extra_async_saves", "_all_support_hma"):
        assert f"self.{name}" in code
    assert parameters(MultiConnector._aggregate_request_finished) == ["self", "request", "per_connector_fn"]
    assert fields(MultiKVConnectorMetadata) >= {"metadata", "extra_async_saves"}


def test_statistics_are_asked_for_in_front_of_events():
    """Events of a step are taken over at that call, without private blocks; what is left behind it would go out as it is."""
    code = inspect.getsource(Scheduler.update_from_output)
    assert code.index("connector.get_kv_connector_stats()") < code.index("kv_cache_manager.take_events()")
    assert code.index("kv_cache_manager.take_events()") < code.index("connector.take_events()")


CALLBACKS = [
    "build_connector_meta",
    "build_connector_worker_meta",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "register_kv_caches",
    "reset_cache",
    "request_finished",
    "bind_gpu_block_pool",
    "requires_piecewise_for_cudagraph",
    "save_kv_layer",
    "shutdown",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
]


@pytest.mark.parametrize("name", CALLBACKS)
def test_vllm_still_has_the_callback(name):
    assert hasattr(base.KVConnectorBase_V1, name)


def test_hybrid_models_end_through_their_own_callback():
    assert parameters(base.SupportsHMA.request_finished_all_groups) == ["self", "request", "block_ids"]
    assert issubclass(GraftConnector, base.SupportsHMA)


def test_failed_loads_can_be_reported_from_0_32_on():
    assert hasattr(base, "KVConnectorTransferResults") == (INSTALLED >= "0.32")
    if INSTALLED >= "0.32":
        assert fields(base.KVConnectorTransferResults) == {"finished_sending", "finished_recving", "failed_recving"}


@pytest.mark.parametrize(
    "name",
    [
        "request_id",
        "all_token_ids",
        "prompt_token_ids",
        "prompt_embeds",
        "num_tokens",
        "num_prompt_tokens",
        "block_hashes",
        "cache_salt",
        "mm_features",
        "lora_request",
        "kv_transfer_params",
        "pooling_params",
        "sampling_params",
        "skip_reading_prefix_cache",
    ],
)
def test_requests_have_what_is_read(name):
    source = inspect.getsource(Request)
    assert f"self.{name}" in source or name in vars(Request)


def test_what_decides_on_refusals_is_there():
    assert 'self.runner_type == "generate"' in inspect.getsource(ModelConfig.__post_init__)
    assert "prompt_logprobs" in SamplingParams.__annotations__
    auxiliary = pytest.importorskip("vllm.config.aux_output", reason="this vLLM has no auxiliary outputs")
    assert isinstance(vars(auxiliary.AuxOutputConfig)["enabled"], property)
    assert "aux_output_config" in fields(VllmConfig)


def test_a_request_is_told_of_before_the_workers_of_its_step_and_sent_after():
    """What is told of a request that ends in the step of its graft is corrected in between, in the same dictionary."""
    code = inspect.getsource(Scheduler.update_from_output)
    freed = code.index("self._free_request(request)")
    told = code.index("kv_transfer_params=kv_transfer_params", freed)
    heard = code.index("self._update_from_kv_xfer_finished(kv_connector_output)", told)
    code.index("connector.get_kv_connector_stats()", heard)
    assert "connector.update_connector_output(" in inspect.getsource(Scheduler._update_from_kv_xfer_finished)


def test_block_hashes_are_a_list_of_bytes():
    assert "self.block_hashes: list[BlockHash] = []" in inspect.getsource(Request.__init__)
    from vllm.v1.core.kv_cache_utils import BlockHash

    assert BlockHash.__supertype__ is bytes


def test_the_connector_is_asked_between_lookup_and_allocation():
    """Hashes are made private before `allocate_slots` publishes blocks under them."""
    source = inspect.getsource(Scheduler.schedule)
    lookup = source.index("_get_local_prefix_cache_hit(")
    asked = source.index("connector.get_num_new_matched_tokens(", lookup)
    allocated = source.index("kv_cache_manager.allocate_slots(", asked)
    source.index("connector.update_state_after_alloc(", allocated)  # raises if one of them stands elsewhere


def test_the_failure_policy_is_read_behind_the_connector():
    source = inspect.getsource(Scheduler.__init__)
    assert source.index("KVConnectorFactory.create_connector(") < source.index("kv_load_failure_policy")
    assert "recompute" in typing.get_args(typing.get_type_hints(KVTransferConfig)["kv_load_failure_policy"])


def test_scheduler_output_has_what_is_read():
    assert {"req_id", "block_ids", "num_computed_tokens"} <= fields(sched_output.NewRequestData)
    assert {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"} <= fields(
        sched_output.CachedRequestData
    )
    assert {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "has_sync_kv_loads",
    } <= fields(sched_output.SchedulerOutput)


def test_a_step_with_sync_loads_starts_them_before_its_forward_pass():
    """A repair runs there: the second token must be drawn from what it leaves."""
    source = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert "start_after_forward = not scheduler_output.has_sync_kv_loads" in source
    first, _ = source.split("yield output")
    assert "start_load_kv" in first
    order = inspect.getsource(Scheduler.schedule)
    assert order.index("has_sync_kv_loads=has_sync_kv_loads") < order.index("_build_kv_connector_meta")


def test_kv_cache_configuration_has_what_is_read():
    assert "kv_cache_groups" in fields(KVCacheConfig)
    assert {"layer_names", "kv_cache_spec"} <= fields(KVCacheGroupSpec)
    assert {"block_size", "num_kv_heads", "head_size", "dtype"} <= fields(FullAttentionSpec)
    assert "sliding_window" in fields(SlidingWindowSpec)
    assert parameters(resolve_kv_cache_block_sizes) == ["kv_cache_config", "vllm_config"]


def test_a_virtual_batch_can_be_built():
    needed = {
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
        "block_table_tensor",
        "slot_mapping",
        "causal",
        "positions",
    }
    assert needed <= fields(CommonAttentionMetadata)
    required = {
        field.name
        for field in dataclasses.fields(CommonAttentionMetadata)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert required <= needed
    assert parameters(AttentionMetadataBuilder.__init__) == [
        "self",
        "kv_cache_spec",
        "layer_names",
        "vllm_config",
        "device",
    ]
    assert parameters(AttentionMetadataBuilder.build)[:3] == ["self", "common_prefix_len", "common_attn_metadata"]
    assert {"attn_metadata", "vllm_config", "num_tokens", "slot_mapping", "skip_compiled"} <= set(
        inspect.signature(set_forward_context.__wrapped__).parameters
    )


def test_a_layer_reads_its_cache_where_it_is_bound():
    """Windows and the self-check bind scratch blocks there for a pass."""
    assert "self.kv_cache" in inspect.getsource(Attention.__init__)
    assert hasattr(Attention, "get_attn_backend")


def test_statistics():
    assert {"reset", "aggregate", "reduce", "is_empty"} <= set(vars(metrics.KVConnectorStats))
    assert parameters(metrics.KVConnectorPromMetrics.__init__)[1:] == [
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ]
    assert parameters(metrics.KVConnectorPromMetrics.observe) == ["self", "transfer_stats_data", "engine_idx"]
