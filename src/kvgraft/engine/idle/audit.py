"""Compare requests that were served with grafts with full prefill, while the engine has nothing else to do."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.engine.idle.scoring import score_steps
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.errors import KVGraftError, one_line
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.idle.scoring import Score
    from kvgraft.engine.kv.cache_manager import CacheManager
    from kvgraft.engine.requests.request import Request
    from kvgraft.engine.requests.risk import HeldRisk
    from kvgraft.fidelity.control import Loss
    from kvgraft.graft.model import ModelAdapter
    from kvgraft.reuse.decision import Sampled

logger = logging.getLogger(__name__)

MOST_PENDING = 64
"""Audits that wait; when there are more, further requests are left out, regardless of their answers."""
AUDIT_REUSE = ReuseMode.OFF
"""An audit that reused anything could meet the very K/V that it is to judge."""


class AnswerEvidence:
    """Evidence of an answer for its audit, gathered while it is served."""

    def __init__(self, loss: Loss, sampled: Sampled) -> None:
        """Gather what the parts of an answer that is repaired at the time of `sampled` are judged by."""
        from kvgraft.fidelity.control import PARTS  # loaded with the calibration

        self._loss = loss
        self._length = loss.length(PARTS[sampled.repair])
        self._rows: list[NDArray[Any]] = []

    def add(self, logits: Tensor) -> None:
        """Take in the logits (vocab_size,) that the next output token is drawn from."""
        if len(self._rows) < self._length:
            self._rows.append(self._loss.evidence(logits[None].numpy(force=True)))

    @property
    def num_tokens(self) -> int:
        """Output tokens that it is about."""
        return len(self._rows)

    def value(self) -> NDArray[Any]:
        """As `Loss.of` takes it."""
        return np.concatenate(self._rows)


@dataclass(frozen=True, slots=True, eq=False)
class Audit:
    """An answered request that waits for its audit.

    Attributes:
        request: As it was served.
        output_ids: The first tokens of its answer.
        evidence: Of these tokens, as they were served.
        sampled: Its class and notch.
    """

    request: Request
    output_ids: Sequence[int]
    evidence: NDArray[Any]
    sampled: Sampled


class Auditor:
    """A bounded queue of audits, run one forward pass at a time. Not thread-safe.

    Nothing of an audit is kept for others: it reads and leaves no prefix and no donor.

    Attributes:
        num_left_out: Sampled requests that were not audited: too many were waiting, or their audit failed.
    """

    def __init__(self, adapter: ModelAdapter, manager: CacheManager, risk: HeldRisk) -> None:
        self.num_left_out = 0
        self._adapter = adapter
        self._manager = manager
        self._risk = risk
        self._pending: deque[Audit] = deque()
        self._running: Generator[None, None, Score] | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._pending)

    @property
    def num_pending(self) -> int:
        """Audits that wait or run."""
        return len(self._pending)

    @property
    def is_running(self) -> bool:
        """Whether an audit holds slots."""
        return self._running is not None

    def add(self, audit: Audit) -> None:
        """Queue an audit, or leave it out if too many wait."""
        if len(self._pending) >= MOST_PENDING:
            self.num_left_out += 1
            return
        self._pending.append(audit)

    def step(self, max_rows: int) -> None:
        """Run one forward pass of the audit that has waited longest; takes in its loss when it is done.

        Args:
            max_rows: Of a forward pass; those of an audit that has begun stay what they were.
        """
        audit = self._pending[0]
        try:
            if self._running is None:
                self._running = self._begin(audit, max_rows)
            next(self._running)
        except StopIteration as end:
            self._finish(audit, end.value)
        except KVGraftError as error:  # no room, say
            logger.info("request %s is not audited: %s", audit.request.request_id, one_line(error))
            self._leave_out()
        except Exception as error:
            self._manager.space.doubt(error)
            logger.exception("the audit of request %s failed", audit.request.request_id)
            self._leave_out()
        except BaseException:  # its user's Ctrl-C: what it has computed is given back
            self.interrupt()
            raise

    def interrupt(self) -> None:
        """Give slots back; the audit begins again later."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def clear(self) -> None:
        """Forget all audits: they are about weights that may have changed, or the engine ends."""
        self.interrupt()
        self._pending.clear()

    def rebuild(self) -> None:
        """Forget all audits, and what the running one holds: its slots were taken back with all others."""
        running, self._running = self._running, None
        self._pending.clear()
        if running is not None:
            try:
                running.close()
            except Exception:
                logger.exception("an audit that was given up could not be closed")

    def _begin(self, audit: Audit, max_rows: int) -> Generator[None, None, Score]:
        count = len(audit.output_ids)
        request = replace(
            audit.request,
            request_id=f"audit of {audit.request.request_id}",
            reuse=AUDIT_REUSE,
            sampling=SamplingParams(count),
        )
        continuation = np.asarray(audit.output_ids, np.int64)
        return score_steps(self._adapter, self._manager, request, continuation, max_rows=max_rows)

    def _finish(self, audit: Audit, score: Score) -> None:
        loss = self._risk.loss
        self._running = None
        self._pending.popleft()
        if loss is not None:
            from kvgraft.fidelity.control import PARTS  # loaded with the calibration

            full = loss.evidence(score.logits.numpy(force=True))
            losses = {part: loss.of(full, audit.evidence, part) for part in PARTS[audit.sampled.repair]}
            known = {part: found for part, found in losses.items() if found is not None}
            self._risk.audited(audit.sampled, known, audit.request.request_id)

    def _leave_out(self) -> None:
        self._running = None
        self._pending.popleft()
        self.num_left_out += 1
