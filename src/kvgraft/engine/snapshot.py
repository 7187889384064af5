"""State of an engine at a moment, for health pages and metrics, on any thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.engine.memory_use import MemoryUse
from kvgraft.types import UNCALIBRATED, RiskStatement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.engine.core import Engine
    from kvgraft.memory import SlotUsage
    from kvgraft.types import StoreCounts


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of an engine.

    Attributes:
        usage: K/V slots by holder.
        window_usage: Slots of window layers by holder, where these have slots of their own.
        state_usage: States by holder, where layers keep states.
        donor_tokens: Of donors in all tiers.
        slots_kept: Slots that are kept for sessions.
        num_errors: Lookups, grafts and publications that failed and became misses.
        num_preemptions: Counted each time.
        attention: The attention backend and why it was chosen.
        risk: Statement about grafts of reuse classes that were never audited.
        class_risks: Statements by reuse class that was audited, and by part of the answers.
        proposals: Counts of donors that an embedder named; empty without one.
        semantic_calls: Calls of a semantic provider, by outcome; empty without one.
        num_left_out_audits: Sampled requests that were not audited.
        num_cold_donors: Donors that lie in stores alone.
        num_heal_candidates: Texts of grafted requests that wait to be healed.
        heals_dropped: Texts that were not healed, by reason.
        num_rebuilds: How often the engine began anew with nothing cached, since that could not be trusted.
    """

    is_alive: bool
    is_closing: bool
    num_running: int
    num_waiting: int
    usage: SlotUsage
    window_usage: SlotUsage | None
    state_usage: SlotUsage | None
    num_donors: int
    donor_tokens: int
    host_bytes: int
    prefix_host_tokens: int
    num_sessions: int
    slots_kept: int
    num_errors: int
    num_preemptions: int
    attention: str
    risk: RiskStatement = UNCALIBRATED
    class_risks: Mapping[str, Mapping[str, RiskStatement]] = field(default_factory=dict)
    proposals: Mapping[str, int] = field(default_factory=dict)
    semantic_calls: Mapping[str, int] = field(default_factory=dict)
    num_pending_audits: int = 0
    num_left_out_audits: int = 0
    stores: tuple[StoreCounts, ...] = ()
    num_cold_donors: int = 0
    num_heal_candidates: int = 0
    num_healed_tokens: int = 0
    num_healed_requests: int = 0
    heals_dropped: Mapping[str, int] = field(default_factory=dict)
    num_rebuilds: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)

    @classmethod
    def of(cls, engine: Engine, *, is_alive: bool, is_closing: bool) -> EngineSnapshot:
        """Look at `engine`, on any thread; cheap. Numbers may be of neighbouring moments."""
        return cls(
            is_alive=is_alive,
            is_closing=is_closing,
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            usage=engine.space.usage(),
            window_usage=engine.space.window_usage(),
            state_usage=engine.space.state_usage(),
            num_donors=len(engine.space.donors),
            donor_tokens=engine.space.donors.num_tokens,
            host_bytes=engine.space.host.used_bytes,
            prefix_host_tokens=engine.space.prefix_host_tokens,
            num_sessions=len(engine.sessions),
            slots_kept=engine.space.kept.num_slots,
            num_errors=engine.manager.num_errors,
            proposals=engine.proposals(),
            semantic_calls=engine.manager.semantic_calls(),
            num_preemptions=engine.scheduler.num_preemptions,
            attention=engine.adapter.attention.reason,
            risk=engine.risk.start,
            class_risks=engine.risk.statements(),
            num_pending_audits=engine.auditor.num_pending,
            num_left_out_audits=engine.auditor.num_left_out,
            stores=() if engine.stores is None else engine.stores.status(),
            num_cold_donors=engine.space.donors.num_stored,
            num_heal_candidates=engine.healer.num_candidates,
            num_healed_tokens=engine.healer.num_tokens,
            num_healed_requests=engine.healer.num_requests,
            heals_dropped=dict(engine.healer.dropped),
            num_rebuilds=engine.num_rebuilds,
            memory=MemoryUse.of(engine.space, engine.config),
        )
