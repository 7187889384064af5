"""Health of the engine: its thread runs, and no K/V slot is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

from kvgraft.errors import KVGraftError, one_line
from kvgraft.observability.process import process_memory
from kvgraft.reuse.report import risk_as_dict

if TYPE_CHECKING:
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.engine.memory_use import MemoryUse
    from kvgraft.engine.snapshot import EngineSnapshot
    from kvgraft.memory import SlotUsage

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Checks walk all caches; more often would cost steps."""
_PATIENCE_S = 2.0
"""Seconds that an answer waits for a check; it runs between two steps, and a step can be long."""
_KEPT_S = 10.0
"""Seconds for which a check that found nothing answers by itself, while the next one waits for the end of a step."""
_STUCK_S = 60.0
"""A check that waits longer means that the engine no longer makes steps."""


class Monitored(Protocol):
    """A server as its health check sees it.

    Attributes:
        engine: Computes requests.
        draining: No more requests are taken.
    """

    engine: AsyncLLM
    draining: bool


class HealthMonitor:
    """Runs `AsyncLLM.check` at most once a second, however often it is asked.

    Answers say what the check before has found, if that is nothing and was just now; else they wait for the next one.
    """

    def __init__(self, context: Monitored) -> None:
        self._context = context
        self._check: asyncio.Task[None] | None = None
        self._started = 0.0
        self._well_at = -math.inf
        self._problem: str | None = None

    async def report(self) -> dict[str, object]:
        """Return the health as JSON values; `status` is `ok` or a word for what is wrong."""
        snapshot = self._context.engine.snapshot()
        if snapshot.is_alive and not self._context.draining:
            await self._refresh()
        own = {"window_slots": snapshot.window_usage, "states": snapshot.state_usage}
        return {
            "status": self._status(is_alive=snapshot.is_alive),
            "invariant": self._problem or "ok",
            "slots": _by_holder(snapshot.usage),
            **{name: _by_holder(usage) for name, usage in own.items() if usage is not None},
            "requests": {"running": snapshot.num_running, "waiting": snapshot.num_waiting},
            "memory": _memory(snapshot.memory),
            "donors": snapshot.num_donors,
            "donor_host_bytes": int(snapshot.host_bytes),
            "prefix_host_tokens": snapshot.prefix_host_tokens,
            "sessions": {"open": snapshot.num_sessions, "kept_slots": snapshot.slots_kept},
            "graft_errors": snapshot.num_errors,
            "preemptions": snapshot.num_preemptions,
            "rebuilds": snapshot.num_rebuilds,
            "healing": {
                "candidates": snapshot.num_heal_candidates,
                "healed_tokens": snapshot.num_healed_tokens,
                "healed_requests": snapshot.num_healed_requests,
            },
            "risk": _risk(snapshot),
        }

    def _status(self, *, is_alive: bool) -> str:
        if self._context.draining:
            return "shutting_down"
        if not is_alive:
            return "engine_dead"
        if self._problem is not None:
            return "invariant_broken"
        if self._check is not None and time.monotonic() - self._started > _STUCK_S:
            return "engine_stuck"
        return "ok"

    async def _refresh(self) -> None:
        if self._check is None and time.monotonic() - self._started >= CHECK_INTERVAL_S:
            self._started = time.monotonic()
            self._check = asyncio.create_task(self._run())
        if self._check is not None and time.monotonic() - self._well_at > _KEPT_S:
            await asyncio.wait({self._check}, timeout=_PATIENCE_S)

    async def _run(self) -> None:
        try:
            await self._context.engine.check()
            self._problem, self._well_at = None, time.monotonic()
        except KVGraftError as error:
            self._problem, self._well_at = str(error), -math.inf
            logger.error("the cache's invariant is broken: %s", error)  # noqa: TRY400 - the message says it all
        except Exception as error:  # a cache may be another package's, and what is broken may be what is looked at
            self._problem, self._well_at = f"it cannot be checked: {one_line(error)}", -math.inf
            logger.exception("the cache's invariant cannot be checked")
        finally:
            self._check = None


def _risk(snapshot: EngineSnapshot) -> dict[str, object]:
    """Return what may be said about grafts: of classes without audits, and of the others by class and part of the answer."""
    return {
        **risk_as_dict(snapshot.risk),
        "classes": {
            name: {part: risk_as_dict(risk) for part, risk in parts.items()}
            for name, parts in snapshot.class_risks.items()
        },
        "pending_audits": snapshot.num_pending_audits,
        "left_out_audits": snapshot.num_left_out_audits,
    }


def _memory(use: MemoryUse) -> dict[str, object]:
    """Return what is taken of each limit. K/V slots and the host's prefixes are allocated at the start, full or not."""
    process = process_memory()
    return {
        **{name: {"used_bytes": used, "limit_bytes": limit} for name, (used, limit) in use.pools.items()},
        "donor_tokens": {"used": use.donor_tokens, "limit": use.donor_tokens_limit},
        "process": {
            "resident_bytes": process.resident_bytes,
            "limit_bytes": process.limit_bytes,
            "limited_by": process.limited_by,
        },
    }


def _by_holder(usage: SlotUsage) -> dict[str, int]:
    return {
        "free": int(usage.free),
        "request": int(usage.request),
        "cached": int(usage.cached),
        "donor": int(usage.donor),
        "total": int(usage.total),
    }
