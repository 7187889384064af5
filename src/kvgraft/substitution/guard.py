"""Ask a provider so that its errors and its slowness cost nothing but its answer."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from kvgraft.errors import ConfigError
from kvgraft.substitution.provider import SemanticPrefixResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.substitution.provider import SemanticPrefixProvider
    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)

_MAX_UNHEARD = 64
"""Stored prompts that wait to be reported to a provider; more are not reported."""

_END_S = 2.0
"""So long a call under way may take when the provider is shut down; a stuck one is left to itself."""

Answer = TypeVar("Answer")


@dataclass(slots=True)
class SemanticCounters:
    """Outcomes of the provider's calls; each counts once."""

    hits: int = 0
    """Questions with an answer that stands in."""
    misses: int = 0
    """Questions without an answer, or with one that gains too little."""
    errors: int = 0
    """Calls that failed, or gave an answer without sense."""
    timeouts: int = 0
    """Calls that took too long, or were not begun because one before them does."""

    def by_outcome(self) -> dict[str, int]:
        """Return the counts by the names that metrics have for them."""
        return {"hit": self.hits, "miss": self.misses, "error": self.errors, "timeout": self.timeouts}

    @property
    def num_failed(self) -> int:
        """Calls that gave nothing because of the provider."""
        return self.errors + self.timeouts


class _Caller:
    """Makes calls one after another on a thread that keeps no process from ending, however long a call takes."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, call: Callable[[], Answer]) -> Future[Answer]:
        """Queue a call; raises `RuntimeError` if no thread can be had, or after `close`."""
        if self._is_closed:
            raise RuntimeError("the semantic provider was shut down")
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvgraft-semantic", daemon=True)
            thread.start()
            self._thread = thread
        future: Future[Answer] = Future()
        self._calls.put((future, call))  # type: ignore[arg-type]
        return future

    def close(self) -> None:
        """Cancel what waits, and end the thread after the call under way."""
        self._is_closed = True
        try:
            while True:
                waiting = self._calls.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
        except Empty:
            self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the call under way after `close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
                future.set_exception(error)


class GuardedProvider:
    """A provider with a deadline, on a thread of its own. Not thread-safe.

    Calls run one after another in the order in which they were made. What was stored is reported without waiting. A proposal
    is waited for until the deadline; while a call that overran it still runs, others are not begun and count as timeouts, so
    that a stuck provider costs one thread and one deadline.

    Without a deadline calls are made directly and exceptions reach the caller: the bare contract.
    """

    def __init__(self, provider: SemanticPrefixProvider, deadline_s: float | None) -> None:
        if deadline_s is not None and not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0 or None, not {deadline_s}")
        self.provider = provider
        self.counters = SemanticCounters()
        self._deadline_s = deadline_s
        self._caller = None if deadline_s is None else _Caller()
        self._late: Future[object] | None = None
        self._unheard = threading.BoundedSemaphore(_MAX_UNHEARD)
        self._is_insert_refused = False
        self._is_shut_down = False

    @property
    def is_bare(self) -> bool:
        """Whether there is no deadline, and exceptions reach the caller."""
        return self._caller is None

    def propose(self, rid: str, token_ids: TokenArray) -> SemanticPrefixResult | None:
        """Ask for a stored prompt that may stand in; None also on an error or an overrun, which are counted."""
        known = self._handed_out(token_ids)
        answer: object = self._answer(lambda: self.provider.on_prefix_miss(rid=rid, token_ids=known))
        if answer is not None and not isinstance(answer, SemanticPrefixResult):
            self.counters.errors += 1
            logger.error("semantic provider answered with a %s; counted as a miss", type(answer).__name__)
            return None
        proposal = answer
        if proposal is not None and not proposal.skip_insert and not self._is_insert_refused:
            self._is_insert_refused = True
            logger.warning(
                "%s proposes with skip_insert=False, which is refused: K/V of other tokens are never stored",
                type(self.provider).__name__,
            )
        return proposal

    def cached(self, rid: str, token_ids: TokenArray) -> None:
        """Report to the provider what was stored. Complexity: a copy of the tokens."""
        known = self._handed_out(token_ids)
        if self._caller is None:
            self.provider.on_request_cached(rid=rid, token_ids=known)
        elif self._is_stuck() or not self._unheard.acquire(blocking=False):
            self.counters.timeouts += 1
        else:
            try:
                self._caller.submit(lambda: self._report(rid, known))
            except RuntimeError:
                self._unheard.release()
                self.counters.errors += 1
                logger.exception("a stored prompt cannot be reported to the semantic provider")

    def close(self) -> None:
        """Stop the thread; does not wait for a stalled call."""
        if self._caller is not None:
            self._caller.close()

    def shut_down(self) -> None:
        """Stop the thread and let the provider give back its resources, once; an error of it is logged.

        A call under way comes to its end before, unless it is stuck.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.close()
        if self._caller is not None:
            self._caller.join(_END_S)
        try:
            self.provider.on_shutdown()
        except Exception:
            logger.exception("the semantic provider failed at its end")

    def _report(self, rid: str, token_ids: TokenArray) -> None:
        try:
            self.provider.on_request_cached(rid=rid, token_ids=token_ids)
        except Exception:
            self.counters.errors += 1
            logger.exception("semantic provider failed to hear of a stored prompt")
        finally:
            self._unheard.release()

    def _handed_out(self, token_ids: TokenArray) -> TokenArray:
        """Tokens for the provider, read-only; a copy where it may go on reading when the caller has gone on."""
        view = token_ids.view() if self._deadline_s is None else token_ids.copy()
        view.flags.writeable = False
        return view

    def _is_stuck(self) -> bool:
        if self._late is not None and self._late.done():
            self._late = None
        return self._late is not None

    def _answer(self, call: Callable[[], Answer]) -> Answer | None:
        """Call the provider directly, or with the deadline, errors and overruns counted."""
        if self._caller is None:
            return call()
        if self._is_stuck():
            self.counters.timeouts += 1
            return None
        try:
            future = self._caller.submit(call)
            return future.result(self._deadline_s)
        except FutureTimeoutError:
            self._late = future  # type: ignore[assignment]
            self.counters.timeouts += 1
            logger.warning("semantic provider took longer than %s s; counted as a miss", self._deadline_s)
        except (Exception, CancelledError):
            self.counters.errors += 1
            logger.exception("semantic provider failed; counted as a miss")
        return None
