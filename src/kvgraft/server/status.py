"""Endpoints about the server: index, models, health, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from kvgraft import __version__
from kvgraft.http.errors import APIError
from kvgraft.http.fields import Fields
from kvgraft.http.json_io import json_response
from kvgraft.server.context import context_of
from kvgraft.server.options import check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.samples import Sample
    from starlette.requests import Request

    from kvgraft.observability.prometheus import PrometheusRecorder
    from kvgraft.server.context import ServerContext

ENDPOINTS = {
    "POST /v1/completions": "continue text or token ids",
    "POST /v1/chat/completions": "answer a conversation",
    "POST /v1/responses": "answer a conversation in OpenAI's newer form",
    "POST /v1/responses/input_tokens": "tokens of such a conversation",
    "POST /v1/messages": "answer a conversation in Anthropic's form",
    "POST /v1/messages/count_tokens": "tokens of such a conversation",
    "POST /v1/sessions": "open a session",
    "DELETE /v1/sessions/{id}": "close a session",
    "GET /v1/models": "the model that is served",
    "POST /tokenize": "token ids of a text or a conversation",
    "POST /detokenize": "text of token ids",
    "POST /reset_prefix_cache": "forget all cached text",
    "GET /health": "state of the server",
    "GET /metrics": "metrics in the Prometheus format",
}


async def index(_request: Request) -> Response:
    """Return name, version and the list of endpoints."""
    return json_response({"name": "kvgraft", "version": __version__, "endpoints": ENDPOINTS})


async def list_models(request: Request) -> Response:
    """Return the model that is served, as OpenAI's list of one."""
    return json_response({"object": "list", "data": [_model(context_of(request))]})


async def get_model(request: Request) -> Response:
    """Return the model, or 404 for another name."""
    context = context_of(request)
    check_model(Fields({"model": request.path_params["id"]}), context.model_id)
    return json_response(_model(context))


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all prefixes and donors, as vLLM's endpoint of the same name does; the body is not read."""
    await context_of(request).engine.reset()
    return json_response({"status": "ok"})


async def health(request: Request) -> Response:
    """Return 200 if requests will be answered, else 503, and the state in both cases."""
    context = context_of(request)
    report = await context.health.report()
    refusal = context.engine.graft_refusal
    facts = {
        "version": __version__,
        "model": context.model_id,
        "reuse": context.config.reuse,
        "attention": context.engine.snapshot().attention,
        "graft": "accepted" if refusal is None else f"refused: {refusal}",
    }
    return json_response(report | facts, 200 if report["status"] == "ok" else 503)


async def metrics(request: Request) -> Response:
    """Return all metrics in the Prometheus format, those of load and memory as of now."""
    context = context_of(request)
    if context.metrics is None:
        raise APIError(404, "this server keeps no metrics", code="not_found")
    return Response(exposition(context), media_type="text/plain; version=0.0.4; charset=utf-8")


def exposition(context: ServerContext) -> bytes:
    """All metrics as of now; empty where none are kept."""
    recorder = context.metrics
    if recorder is None:
        return b""
    _take_state(context, recorder)
    return recorder.exposition()


def samples(context: ServerContext, names: Sequence[str]) -> list[Sample]:
    """The metrics with these names as of now; none where none are kept."""
    recorder = context.metrics
    if recorder is None:
        return []
    _take_state(context, recorder)
    return list(recorder.samples(names))


def _take_state(context: ServerContext, recorder: PrometheusRecorder) -> None:
    """Have the recorder take over what no event reports."""
    snapshot = context.engine.snapshot()
    usage = snapshot.usage
    recorder.set_load(snapshot.num_running, snapshot.num_waiting)
    recorder.set_memory(
        (usage.free, usage.request, usage.cached, usage.donor),
        snapshot.num_donors,
        snapshot.donor_tokens,
        snapshot.host_bytes,
    )
    recorder.set_pools(snapshot.memory.pools)
    recorder.set_donor_host_limit(snapshot.memory.host_limit_bytes)
    recorder.set_refused(is_refused=context.engine.graft_refusal is not None)
    recorder.set_host_prefixes(snapshot.prefix_host_tokens)
    recorder.set_sessions(snapshot.num_sessions, snapshot.slots_kept)
    recorder.set_errors(snapshot.num_errors)
    recorder.set_proposals(snapshot.proposals)
    recorder.set_semantic_calls(snapshot.semantic_calls)
    recorder.set_stores(snapshot.stores, snapshot.num_cold_donors)
    recorder.set_risk(snapshot.class_risks)
    recorder.set_healing(
        snapshot.num_heal_candidates,
        snapshot.num_healed_tokens,
        snapshot.num_healed_requests,
        snapshot.heals_dropped,
    )


def _model(context: ServerContext) -> dict[str, object]:
    return {
        "id": context.model_id,
        "object": "model",
        "created": context.created,
        "owned_by": "kvgraft",
        "max_model_len": int(context.engine.max_model_len),
    }
