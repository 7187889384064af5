"""What the engines call what all of them measure, and what one of them alone has. Reuse has one set of names: `reuse.py`."""

from __future__ import annotations

from dataclasses import dataclass

from panels import Panel, Target

RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Engine:
    """An engine's own metrics.

    Attributes:
        name: Of the file.
        title: As people call it.
        anchor: Gauge that every running server has; the variables are read from it.
        has_engines: Metrics have a label `engine`, for servers of several.
        waiting: Gauge of requests that wait; `anchor` is that of those that run.
        first_token: Histogram of times to the first token.
        token: Histogram of times between tokens.
        token_text: What of them it is.
        whole: Histogram of times from arrival to the end.
        queue: Histogram of times that requests waited.
        generated: Counter of generated tokens.
        ended: Expression of requests per second by what became of them, and its legend.
        usage: Expression of the share of K/V on the device that is taken.
        cache: Panels of the row of the K/V cache.
        failed: Panels of the row of errors.
    """

    name: str
    title: str
    anchor: str
    has_engines: bool
    waiting: str
    first_token: str
    token: str
    token_text: str
    whole: str
    queue: str
    generated: str
    ended: Target
    usage: str
    cache: tuple[Panel, ...]
    failed: tuple[Panel, ...]


def per_second(metric: str, by: str = "", where: str = "") -> str:
    """The rate of a counter, summed over everything but a label."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({metric}{{@{',' + where if where else ''}}}{RATE}))"


_HOLDERS = ("request", "cached", "donor", "free")

EMBEDDED = Engine(
    name="embedded",
    title="kvgraft",
    anchor="kvgraft:num_requests_running",
    has_engines=False,
    waiting="kvgraft:num_requests_waiting",
    first_token="kvgraft:time_to_first_token_seconds",
    token="kvgraft:time_per_output_token_seconds",
    token_text="mean of a request",
    whole="kvgraft:e2e_request_latency_seconds",
    queue="kvgraft:request_queue_time_seconds",
    generated="kvgraft:generation_tokens_total",
    ended=Target(per_second("kvgraft:requests_total", "outcome"), "{{outcome}}"),
    usage='1 - sum(kvgraft:kv_slots{@,holder="free"}) / (sum(kvgraft:kv_slots{@}) > 0)',
    cache=(
        Panel(
            "K/V slots by holder",
            "One slot per token on the device. `cached` are exact prefixes, `donor` is text that can be grafted; both leave "
            "when requests need room, so that a full cache is a cache at work.",
            tuple(Target(f'sum(kvgraft:kv_slots{{@,holder="{holder}"}})', holder) for holder in _HOLDERS),
            stack="normal",
        ),
        Panel(
            "Memory of each pool, of its limit",
            "`kv` is device memory, `host_donors` and `host_prefixes` are host memory, `process` is resident memory against "
            "that of the container or machine: beyond it the kernel ends the process.",
            (
                Target(
                    "sum by (pool) (kvgraft:memory_used_bytes{@}) / (sum by (pool) (kvgraft:memory_limit_bytes{@}) > 0)",
                    "{{pool}}",
                ),
            ),
            unit="percentunit",
            top=1,
        ),
        Panel(
            "Preemptions",
            "Requests that lost their slots to others and were computed again. Steadily above 0: too few slots.",
            (Target(per_second("kvgraft:num_preemptions_total"), "preemptions"),),
            unit="ops",
        ),
        Panel(
            "Rows of forward passes",
            "Tokens of prompts and of answers that passes computed.",
            (Target(per_second("kvgraft:step_rows_total", "phase"), "{{phase}}"),),
            stack="normal",
        ),
        Panel(
            "Duration of a step",
            "One forward pass with all that belongs to it.",
            (
                Target(
                    f"histogram_quantile(0.95, sum by (le) (rate(kvgraft:step_seconds_bucket{{@}}{RATE})))",
                    "p95",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Sessions",
            "Open sessions, and slots that are kept for them.",
            (
                Target("sum(kvgraft:sessions{@})", "sessions"),
                Target("sum(kvgraft:session_kv_slots{@})", "slots kept"),
                Target("sum(kvgraft:prefix_host_tokens{@})", "tokens of prefixes in host memory"),
            ),
        ),
    ),
    failed=(
        Panel(
            "Failed requests",
            "Requests that ended with an error. Failures of reuse are not among them: these requests are computed.",
            (Target(per_second("kvgraft:requests_total", where='outcome="error"'), "errors"),),
            unit="reqps",
            nothing="None",
        ),
        Panel(
            "HTTP responses that are errors",
            "4xx is the client's doing (429: the queue is full), 5xx the server's.",
            (Target(per_second("kvgraft:http_responses_total", "status", 'status=~"[45].."'), "{{status}}"),),
            unit="reqps",
            nothing="None",
        ),
    ),
)

VLLM = Engine(
    name="vllm",
    title="vLLM with kvgraft",
    anchor="vllm:num_requests_running",
    has_engines=True,
    waiting="vllm:num_requests_waiting",
    first_token="vllm:time_to_first_token_seconds",
    token="vllm:inter_token_latency_seconds",
    token_text="each of them",
    whole="vllm:e2e_request_latency_seconds",
    queue="vllm:request_queue_time_seconds",
    generated="vllm:generation_tokens_total",
    ended=Target(per_second("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
    usage="max(vllm:kv_cache_usage_perc{@})",
    cache=(
        Panel(
            "K/V blocks in use",
            "Share of vLLM's blocks that requests hold; prefixes that wait to be used again count as free.",
            (
                Target("max(vllm:kv_cache_usage_perc{@})", "fullest"),
                Target("avg(vllm:kv_cache_usage_perc{@})", "mean"),
            ),
            unit="percentunit",
            top=1,
        ),
        Panel(
            "Hits of the prefix cache",
            "Share of asked tokens. `external` is what connectors brought, kvgraft's grafts among it.",
            (
                Target(
                    f"{per_second('vllm:prefix_cache_hits_total')} / ({per_second('vllm:prefix_cache_queries_total')} > 0)",
                    "vLLM's own",
                ),
                Target(
                    f"{per_second('vllm:external_prefix_cache_hits_total')} / "
                    f"({per_second('vllm:external_prefix_cache_queries_total')} > 0)",
                    "external",
                ),
            ),
            unit="percentunit",
            top=1,
        ),
        Panel(
            "Prompt tokens by vLLM's sources",
            "As vLLM counts them. The row below splits what came from outside.",
            (Target(per_second("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
            stack="normal",
        ),
        Panel(
            "Preemptions",
            "Requests that lost their blocks and were computed again.",
            (Target(per_second("vllm:num_preemptions_total"), "preemptions"),),
            unit="ops",
        ),
    ),
    failed=(
        Panel(
            "Requests that ended early",
            "`error` is vLLM's own failure, `abort` a client that left.",
            (
                Target(
                    per_second("vllm:request_success_total", "finished_reason", 'finished_reason=~"error|abort"'),
                    "{{finished_reason}}",
                ),
            ),
            unit="reqps",
            nothing="None",
        ),
    ),
)

SGLANG = Engine(
    name="sglang",
    title="SGLang with kvgraft",
    anchor="sglang:num_running_reqs",
    has_engines=False,
    waiting="sglang:num_queue_reqs",
    first_token="sglang:time_to_first_token_seconds",
    token="sglang:inter_token_latency_seconds",
    token_text="each of them",
    whole="sglang:e2e_request_latency_seconds",
    queue="sglang:queue_time_seconds",
    generated="sglang:generation_tokens_total",
    ended=Target(per_second("sglang:num_requests_total"), "ended"),
    usage="max(sglang:token_usage{@})",
    cache=(
        Panel(
            "K/V slots",
            "`evictable` are prefixes and donors that leave when requests need room.",
            (
                Target("sum(sglang:kv_used_tokens{@})", "in use"),
                Target("sum(sglang:kv_evictable_tokens{@})", "evictable"),
                Target("sum(sglang:kv_available_tokens{@})", "free"),
            ),
            stack="normal",
        ),
        Panel(
            "Cached tokens by SGLang's sources",
            "As SGLang counts them: exact prefixes and what kvgraft copied.",
            (Target(per_second("sglang:cached_tokens_total", "cache_source"), "{{cache_source}}"),),
            stack="normal",
        ),
        Panel(
            "Evicted tokens",
            "Slots of the device that eviction freed.",
            (Target(per_second("sglang:evicted_tokens_total"), "evicted"),),
        ),
        Panel(
            "Retracted requests",
            "Requests that lost their slots and were computed again.",
            (Target(per_second("sglang:num_retracted_requests_total"), "retracted"),),
            unit="ops",
        ),
    ),
    failed=(
        Panel(
            "Aborted requests",
            "Requests that ended without an answer.",
            (Target(per_second("sglang:num_aborted_requests_total"), "aborted"),),
            unit="reqps",
            nothing="None",
        ),
    ),
)

ENGINES = (EMBEDDED, VLLM, SGLANG)
