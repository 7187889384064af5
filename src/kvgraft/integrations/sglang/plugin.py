"""Installation in an SGLang process: the backend's name, and hooks through SGLang's own registry."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from kvgraft.config.sglang import BACKEND
from kvgraft.errors import IntegrationError
from kvgraft.integrations.sglang.versions import HOOKED, WEIGHT_CHANGES, installed_version, unsupported_version

logger = logging.getLogger(__name__)


def install() -> None:
    """Register backend and hooks; an unsupported SGLang gets a backend that refuses to be built, and says why."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    reason = unsupported_version(installed_version())
    if reason is not None:
        logger.error("kvgraft: --radix-cache-backend %s is not available: %s", BACKEND, reason)
        register_radix_cache_backend(BACKEND, _refusing_factory(reason))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_radix_cache_backend(BACKEND, _factory)
    for path in HOOKED:
        name = path.rpartition(".")[2]
        hook, when = (_RESULTS[name], HookType.AFTER) if name in _RESULTS else (_CALLS[name], HookType.BEFORE)
        HookRegistry.register(path.replace(":", "."), hook, when)


def _factory(ctx: Any) -> Any:  # noqa: ANN401 - TreeCacheBuildContext -> BasePrefixCache
    from kvgraft.integrations.sglang.backend import build_cache

    return build_cache(ctx)


def _refusing_factory(reason: str) -> Any:  # noqa: ANN401
    def refuse(_: Any) -> Any:  # noqa: ANN401
        raise IntegrationError(f"{reason}; install one of them, or start without --radix-cache-backend {BACKEND}")

    return refuse


def _adder_class(result: Any, scheduler: Any) -> Any:  # noqa: ANN401
    if not _grafts(scheduler):
        return result
    from kvgraft.integrations.sglang.planning.chunks import chunked

    return chunked(result)


def _streamer_class(result: Any, scheduler: Any) -> Any:  # noqa: ANN401
    if not _grafts(scheduler) or scheduler.rust_server is not None:
        return result
    from kvgraft.integrations.sglang.reporting.responses import reporting

    return reporting(result)


def _early_results(result: Any, scheduler: Any, batch: Any, last_batch: Any) -> Any:  # noqa: ANN401
    """Have a first token sent before its request is repaired, for which the next batch waits."""
    return result or bool(last_batch and _grafts(scheduler) and scheduler.tree_cache.repairs_due(batch))


def _repair(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
    if _grafts(scheduler):
        _CACHES[scheduler.tp_worker.model_runner] = scheduler.tree_cache
        scheduler.tree_cache.repair(batch)


def _before_drawing(runner: Any, logits_output: Any, forward_batch: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
    """Have requests repaired whose first tokens are about to be drawn and are not sure."""
    cache = _CACHES.get(runner)
    if cache is not None:
        cache.before_drawing(logits_output.next_token_logits, forward_batch.seq_lens)


_CACHES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Grafting caches, by the model runner that draws tokens for their scheduler."""


def _weights_change(updater: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
    """Called before the weights change, or may have changed."""
    if _grafts(updater.scheduler):
        updater.scheduler.tree_cache.reuse.books.weights_change()


def _weights_begin_to_change(updater: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
    """Called before weights may change outside of SGLang, until `end_weight_update`."""
    if _grafts(updater.scheduler):
        updater.scheduler.tree_cache.reuse.books.weights_change(is_between=True)


def _weights_have_changed(updater: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
    """Called before SGLang learns that these changes are over."""
    if _grafts(updater.scheduler):
        updater.scheduler.tree_cache.reuse.books.weights_change(is_between=False)


def _idle(scheduler: Any) -> None:  # noqa: ANN401
    if _grafts(scheduler):
        scheduler.tree_cache.reuse.idle()


def _grafts(scheduler: Any) -> bool:  # noqa: ANN401
    return getattr(getattr(scheduler, "tree_cache", None), "reuse", None) is not None


_RESULTS = {
    "get_prefill_adder_class": _adder_class,
    "get_output_streamer_class": _streamer_class,
    "is_disable_overlap_for_batch": _early_results,
}
"""Hooks that replace the result of a method."""
_CALLS = {
    **dict.fromkeys(WEIGHT_CHANGES, _weights_change),
    "begin_weight_update": _weights_begin_to_change,
    "end_weight_update": _weights_have_changed,
    "on_idle": _idle,
    "run_batch": _repair,
    "sample": _before_drawing,
}
"""Hooks that are called before a method."""
