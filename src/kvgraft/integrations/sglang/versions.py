"""Versions of SGLang that this integration was written for, and the interfaces that it relies on in them."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvgraft.integrations.versions import installed

SUPPORTED = ("0.5.22", "0.5.23")
"""Versions with the seams below. 0.5.21 lacks `load_back_is_cache_owned` and `get_prefill_adder_class`."""


@dataclass(frozen=True, slots=True)
class Relied:
    """A function of SGLang and the parameters that are passed to it or expected from it, in order.

    Attributes:
        path: `module:Qualified.name`.
        parameters: Names that must be there, in this order; further ones must have defaults.
    """

    path: str
    parameters: tuple[str, ...]


_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_TREE_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface"
_ADDER = "sglang.srt.managers.schedule_policy:PrefillAdder"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_REGISTRY = "sglang.srt.mem_cache.registry"
_CONTEXT = "sglang.srt.model_executor.forward_context"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_DECODERS = ("llama:LlamaModel", "mistral:MistralForCausalLM", "qwen2:Qwen2Model", "qwen3:Qwen3Model")
"""Decoders that passes of our own call; SGLang's Mistral is its Llama under another name."""

WEIGHT_CHANGES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "resume_memory_occupation",
)
"""Methods of the scheduler's weight updater; each may leave other weights, also where it fails."""

HOOKED = (
    "sglang.srt.managers.scheduler:Scheduler.get_prefill_adder_class",
    "sglang.srt.managers.scheduler:Scheduler.get_output_streamer_class",
    "sglang.srt.managers.scheduler:Scheduler.on_idle",
    "sglang.srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch",
    "sglang.srt.managers.scheduler:Scheduler.run_batch",
    f"{_RUNNER}.sample",
    *(f"{_WEIGHTS}.{name}" for name in WEIGHT_CHANGES),
)
"""Methods that get hooks. SGLang only logs a hook that it cannot apply."""

_RELIED = {
    f"{_REGISTRY}:": {
        "register_radix_cache_backend": "name factory",
        "create_unified_radix_cache": "ctx cache_class",
        "default_radix_cache_factory": "ctx",
    },
    "sglang.srt.plugins.hook_registry:HookRegistry.": {"register": "target hook hook_type"},
    "sglang.srt.managers.scheduler:Scheduler.": {
        "get_prefill_adder_class": "self",
        "get_output_streamer_class": "self",
        "on_idle": "self",
        "is_disable_overlap_for_batch": "self batch last_batch",
        "run_batch": "self batch",
    },
    f"{_CACHE}.": {
        "match_prefix": "self params",
        "init_load_back": "self params",
        "load_back_is_cache_owned": "self",
        "prefix_device_indices": "self req",
        "path_device_indices": "self node",
        "checkpoint": "self req up_to",
        "claim_kv_row": "self req",
        "free_kv_row": "self kv ranges",
        "on_release": "self req checkpointed",
        "release_aborted_request": "self request",
        "evict": "self params",
        "evict_for_alloc": "self params",
        "insert": "self params",
        "lock": "self node_id",
        "unlock": "self lock",
        "reset": "self",
        "take_events": "self",
        "touch_prefix": "self key",
        "_free_values": "self device_frees host_frees",
    },
    f"{_TREE_CORE}.": {"match_full_device_prefix": "self key"},
    f"{_ADDER}.": {
        "add_one_req": "self req has_chunked_req truncation_align_size",
        "add_chunked_req": "self req",
        "budget_state": "self",
        "ceil_paged_tokens": "self tokens",
    },
    f"{_STREAMER}.": {
        "stream_output": "self reqs return_logprob",
        "build_additional_customized_info": "self reqs",
        "should_build_additional_customized_info": "self",
    },
    f"{_RUNNER}.": {"sample": "self logits_output forward_batch"},
    "sglang.srt.layers.logits_processor:LogitsProcessor.": {
        "forward": "self input_ids hidden_states lm_head logits_metadata"
    },
    f"{_WEIGHTS}.": dict.fromkeys(WEIGHT_CHANGES, "self recv_req"),
    f"{_CONTEXT}:": {"forward_context": "ctx", "get_attn_backend": ""},
    "sglang.srt.models.": dict.fromkeys(
        (f"{name}.forward" for name in _DECODERS), "self input_ids positions forward_batch"
    ),
}
FUNCTIONS = tuple(
    Relied(owner + name, tuple(parameters.split()))
    for owner, functions in _RELIED.items()
    for name, parameters in functions.items()
)

_BASE = "sglang.srt.mem_cache.base_prefix_cache"
_FIELDS = {
    f"{_BASE}:MatchResult": "device_prefix_len last_device_node last_host_node best_match_node host_hit_length",
    f"{_BASE}:MatchPrefixParams": "key req",
    f"{_BASE}:InitLoadBackParams": "host_hit_length req",
    f"{_BASE}:InsertParams": "key value",
    f"{_BASE}:EvictParams": "num_tokens",
    f"{_REGISTRY}:TreeCacheBuildContext": "server_args params is_hybrid_swa is_hybrid_ssm enable_hierarchical_cache "
    "disable_radix_cache tp_worker model_config tp_size tp_rank is_dsa",
    _WEIGHTS: "scheduler",
    f"{_CONTEXT}:ForwardContext": "attn_backend",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": "forward_mode batch_size input_ids req_pool_indices "
    "seq_lens out_cache_loc seq_lens_sum positions",
    "sglang.srt.layers.logits_processor:LogitsMetadata": "forward_mode",
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": "next_token_logits",
    "sglang.srt.managers.schedule_batch:ScheduleBatch": "reqs decoding_reqs forward_mode",
    "sglang.srt.managers.schedule_batch:ReqKvInfo": "req_pool_idx cache_protected_len kv_committed_len kv_allocated_len",
}
FIELDS = {path: tuple(names.split()) for path, names in _FIELDS.items()}
"""Dataclasses and named tuples of SGLang, and the fields that are read or set."""


def installed_version() -> str | None:
    """Return SGLang's version, or None if it is not installed."""
    return installed("sglang")


def unsupported_version(found: str | None) -> str | None:
    """Return why a version is not served, or None."""
    if found is None:
        return "SGLang is not installed"
    if found.split("+")[0] in SUPPORTED or untested_patch(found) is not None:
        return None
    return f"SGLang {found} is not one of {', '.join(SUPPORTED)}, for which this kvgraft was written and tested"


def untested_patch(found: str) -> str | None:
    """Return a remark on a patch release (`0.5.23.post1`) of a tested version, or None for any other version."""
    base, is_patch, _ = found.split("+", maxsplit=1)[0].partition(".post")
    if not is_patch or base not in SUPPORTED:
        return None
    return f"a patch release of {base}, whose interfaces it has; not tested itself"


def drift() -> list[str]:
    """Compare the installed SGLang with what is relied on; returns one line per difference. Imports SGLang."""
    problems = [line for relied in FUNCTIONS if (line := _function_drift(relied)) is not None]
    for path, names in FIELDS.items():
        missing = [name for name in names if name not in _field_names(path)]
        problems += [f"{path} has no field {name}" for name in missing]
    return problems


def missing_hooks() -> list[str]:
    """Return one line per hook that SGLang did not apply; each applied one leaves a trace. Imports SGLang."""
    return [f"the hook on {path} was not applied" for path in HOOKED if not hasattr(_resolve(path), "__wrapped__")]


def _function_drift(relied: Relied) -> str | None:
    try:
        parameters = inspect.signature(_resolve(relied.path)).parameters
    except (ImportError, AttributeError) as error:
        return f"{relied.path}: {error}"
    names = [name for name in parameters if name in relied.parameters]
    if tuple(names) != relied.parameters:
        return f"{relied.path} takes {', '.join(parameters)}, not {', '.join(relied.parameters)}"
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in parameters.items():
        if name in relied.parameters or parameter.kind in optional:
            continue
        if parameter.default is inspect.Parameter.empty:
            return f"{relied.path} has a new parameter {name} without a default"
    return None


def _field_names(path: str) -> tuple[str, ...]:
    try:
        found = _resolve(path)
    except (ImportError, AttributeError):
        return ()
    if dataclasses.is_dataclass(found):
        return tuple(field.name for field in dataclasses.fields(found))
    return tuple(getattr(found, "_fields", ()))


def _resolve(path: str) -> Any:  # noqa: ANN401 - anything of SGLang's
    module_name, _, names = path.partition(":")
    found: Any = import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    return found
