"""The metrics of vLLM and SGLang that our dashboards ask for: kind and labels, as their sources declare them.

`tests/integration/{vllm,sglang}` hold this table against the installed engines.
"""

from __future__ import annotations

import ast
import re

_V = ("model_name", "engine")
_S = ("model_name", "engine_type")
"""Of SGLang's HTTP server; its schedulers add their ranks, which nothing here asks for."""

VLLM = {
    "vllm:num_requests_running": ("gauge", _V),
    "vllm:num_requests_waiting": ("gauge", _V),
    "vllm:kv_cache_usage_perc": ("gauge", _V),
    "vllm:prefix_cache_queries": ("counter", _V),
    "vllm:prefix_cache_hits": ("counter", _V),
    "vllm:external_prefix_cache_queries": ("counter", _V),
    "vllm:external_prefix_cache_hits": ("counter", _V),
    "vllm:prompt_tokens_by_source": ("counter", (*_V, "source")),
    "vllm:num_preemptions": ("counter", _V),
    "vllm:generation_tokens": ("counter", _V),
    "vllm:request_success": ("counter", (*_V, "finished_reason")),
    "vllm:time_to_first_token_seconds": ("histogram", _V),
    "vllm:inter_token_latency_seconds": ("histogram", _V),
    "vllm:e2e_request_latency_seconds": ("histogram", _V),
    "vllm:request_queue_time_seconds": ("histogram", _V),
}

SGLANG = {
    "sglang:num_running_reqs": ("gauge", _S),
    "sglang:num_queue_reqs": ("gauge", _S),
    "sglang:token_usage": ("gauge", _S),
    "sglang:kv_available_tokens": ("gauge", _S),
    "sglang:kv_evictable_tokens": ("gauge", _S),
    "sglang:kv_used_tokens": ("gauge", _S),
    "sglang:num_retracted_requests_total": ("counter", _S),
    "sglang:num_requests_total": ("counter", (*_S, "is_streaming")),
    "sglang:num_aborted_requests_total": ("counter", _S),
    "sglang:generation_tokens_total": ("counter", (*_S, "is_streaming")),
    "sglang:cached_tokens_total": ("counter", (*_S, "cache_source")),
    "sglang:evicted_tokens_total": ("counter", _S),
    "sglang:time_to_first_token_seconds": ("histogram", (*_S, "is_streaming")),
    "sglang:inter_token_latency_seconds": ("histogram", _S),
    "sglang:e2e_request_latency_seconds": ("histogram", (*_S, "is_streaming")),
    "sglang:queue_time_seconds": ("histogram", _S),
}


def mistakes(table, source, prefix):
    """Metrics of the table that a source declares otherwise, or not at all.

    Labels that all metrics of an engine have are given by a name there; those of the metric itself are read.
    """
    found = declared(source, prefix)
    wrong = {}
    for name, (kind, labels) in table.items():
        told_kind, told_labels = found.get(name, ("none", ""))
        own = set(labels) - {*_V, *_S}
        if kind != told_kind or set(re.findall(r"'(\w+)'", told_labels)) != own:
            wrong[name] = (told_kind, told_labels)
    return wrong


def declared(source, prefix):
    """Metrics that a Python source declares, by the class that makes them: `Counter(name="vllm:...", labelnames=...)`.

    Returns kind and text of `labelnames` by name; nothing is imported.
    """
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: word.value for word in node.keywords}
        name = given.get("name", node.args[0] if node.args else None)
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.startswith(prefix):
            called = ast.unparse(node.func).lower()
            kind = next((one for one in ("counter", "gauge", "histogram") if one in called), "")
            found[name.value] = (kind, ast.unparse(given["labelnames"]) if "labelnames" in given else "")
    return found
