"""Healer of one server: it asks for the hottest approximate texts, one at a time, while the server is idle."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.heal.pace import IdleClock, TokenBudget
from kvgraft.heal.rests import MAX_JITTER, Rests
from kvgraft.heal.server import RefusedError, ServerError
from kvgraft.router.subscriber import ABANDONED_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.heal.server import Server
    from kvgraft.heal.texts import Text, Texts

logger = logging.getLogger(__name__)

_HINT_AFTER_S = 30.0
_MAX_FAILED = 3
_MAX_INTERRUPTED = 10
"""Tries of a text that were interrupted, with `once`; without it there is no end to them."""
_REST_POLLS = 10
"""Rest after the first try, in looks at the server: 5 s."""
_LOOK_S = 1.5
"""How long a look at a server that computes for us may take."""
_MAX_SILENT_LOOKS = 10
"""Our own prompt may keep it from answering (SGLang reports its load between steps), but not for so many looks."""
_LEAST_PATIENCE_S, _LEAST_TOKENS_PER_S = 60.0, 10.0
"""A prompt that takes longer, and longer than at this speed, is never answered."""


class _InterruptedError(Exception):
    """A request of another client came."""


@dataclass(frozen=True, slots=True)
class HealSettings:
    """How a server is treated.

    Attributes:
        idle_s: Seconds without requests of others before a text is computed.
        tokens_per_minute: Tokens that may be computed.
        poll_s: It is asked so often how busy it is.
        quiet_s: Events that have been silent for so long are taken to be all that there are, by `once`.
        once: End when nothing is left.
        log_s: What was done is logged so often.
    """

    idle_s: float = 2.0
    tokens_per_minute: float = 100_000.0
    poll_s: float = 0.5
    quiet_s: float = 3.0
    once: bool = False
    log_s: float = 60.0


@dataclass(slots=True)
class HealCounts:
    """Texts by how healing them ended.

    Attributes:
        texts: Texts that were computed.
        tokens: Tokens of their prompts.
        in_place: Those that were computed from the beginning of their session on.
        interrupted: Texts that were given up for requests of others; they are tried again.
        refused: Texts that the server does not take.
        failed: Texts that were given up because try after try failed for another reason.
    """

    texts: int = 0
    tokens: int = 0
    in_place: int = 0
    interrupted: int = 0
    refused: int = 0
    failed: int = 0


class Healer:
    """Heals one server until it is stopped."""

    def __init__(
        self,
        server: Server,
        texts: Texts,
        settings: HealSettings,
        *,
        is_settled: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Begin without counts.

        Args:
            server: The server.
            texts: Texts that it holds, kept true by a reader of its events.
            settings: Pace, and when it ends.
            is_settled: Whether no events are being asked for again.
            clock: Seconds.
            draw: Numbers from 0 to 1.
        """
        self.counts = HealCounts()
        self._server = server
        self._texts = texts
        self._settings = settings
        self._is_settled = is_settled
        self._clock = clock
        self._draw = draw
        self._idle = IdleClock(clock)
        self._idle_s = settings.idle_s
        self._rests = Rests(_REST_POLLS * settings.poll_s, clock, draw)
        self._budget = TokenBudget(settings.tokens_per_minute, clock)
        self._begun = self._logged_at = clock()
        self._logged = ""
        self._trouble = ""
        self._silent_since: float | None = None
        self._num_silent = 0
        self._has_hinted = False

    @property
    def has_given_up(self) -> bool:
        """With `once`, whether a text was given up, or the server."""
        return self._settings.once and (self.counts.failed > 0 or self._silent_since is not None)

    async def run(self, closing: asyncio.Event) -> None:
        """Heal until `closing` is set, or with `once` until nothing is left. Failures of the server are waited out.

        With `once` that ends where the server has not answered for as long as what it said is believed.
        """
        while not closing.is_set():
            text = self._texts.hottest(self._rests.is_resting)
            if self._settings.once and self._is_over():
                break
            if await self._may_heal(text) and text is not None:
                await self._heal(text, closing)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), self._settings.poll_s)
            self._hint()
            self.log()
        self.log(now=True)

    def log(self, *, now: bool = False) -> None:
        """Log the counts, if they have changed and it is time to."""
        line = self.line()
        if line == self._logged or not (now or self._clock() - self._logged_at >= self._settings.log_s):
            return
        logger.info("%s", line)
        self._logged, self._logged_at = line, self._clock()

    def line(self) -> str:
        """Return the counts of texts that were healed and that are left, as a line."""
        known, counts = self._texts.counts(), self.counts
        return (
            f"{self._server.url}: healed_texts={counts.texts} healed_tokens={counts.tokens} "
            f"interrupted={counts.interrupted} refused={counts.refused} failed={counts.failed} "
            f"open={known.open} private={known.private} donors_announced={known.donors} "
            f"healed_in_place={counts.in_place}"
        )

    async def _may_heal(self, text: Text | None) -> bool:
        """Return whether there is a text and the server has been idle for long enough; without a text it is not asked."""
        if not self._texts.counts().open or await self._others(0):
            self._idle.busy()
            return False
        return text is not None and self._idle.idle_s >= self._idle_s and self._budget.allows(len(text.prompt))

    async def _heal(self, text: Text, closing: asyncio.Event) -> None:
        """Have a text computed; leave as soon as another request comes."""
        self._budget.spend(len(text.prompt))
        computing = asyncio.create_task(self._server.compute(text.prompt.tolist()))
        try:
            await self._watch(text, computing, closing)
        except _InterruptedError:
            self._is_interrupted(text)
        except RefusedError as error:
            self.counts.refused += 1
            self._texts.done(text)
            self._has_answered()
            logger.warning("a text of %d tokens is left as it is: %s", len(text.prompt), error)
        except ServerError as error:
            self._has_failed(text, error)
        else:
            self._is_healed(text)
        finally:
            computing.cancel()  # which closes the connection: servers abort requests without a client
            await asyncio.gather(computing, return_exceptions=True)  # what else it ended with is of no interest

    async def _watch(self, text: Text, computing: asyncio.Task[None], closing: asyncio.Event) -> None:
        """Return when a text is computed.

        Raises:
            RefusedError, ServerError: It is not; also if there is no answer for far longer than it can take.
            _InterruptedError: A request of another client came.
        """
        patience_s = max(_LEAST_PATIENCE_S, len(text.prompt) / _LEAST_TOKENS_PER_S)
        until = self._clock() + patience_s
        while not (await asyncio.wait({computing}, timeout=self._settings.poll_s))[0]:
            is_in_use = closing.is_set() or await self._others(1, _LOOK_S)
            if computing.done():
                break
            if is_in_use:
                raise _InterruptedError
            if self._clock() >= until:
                raise ServerError(f"{self._server.url} has not answered a prompt for {patience_s:.0f} s")
        computing.result()

    def _is_healed(self, text: Text) -> None:
        self.counts.texts += 1
        self.counts.tokens += len(text.prompt)
        self.counts.in_place += text.is_in_place
        self._texts.healed(text)
        self._rests.done(text)
        self._idle_s = self._settings.idle_s
        self._has_answered()

    def _is_interrupted(self, text: Text) -> None:
        """Let a text rest, and wait for a while that no other process waits for, too."""
        self.counts.interrupted += 1
        self._idle.busy()
        self._idle_s = self._settings.idle_s * (1 + MAX_JITTER * self._draw())
        if self._rests.interrupted(text) >= _MAX_INTERRUPTED and self._settings.once:
            self._give_up(text, "other requests came each time")

    def _has_failed(self, text: Text, error: ServerError) -> None:
        self._idle.busy()
        num_failed = self._rests.failed(text)
        if num_failed >= _MAX_FAILED:
            self._give_up(text, str(error))
        else:
            logger.warning("a text of %d tokens is tried again later: %s", len(text.prompt), error)

    def _give_up(self, text: Text, reason: str) -> None:
        self.counts.failed += 1
        self._texts.done(text)
        logger.warning("a text of %d tokens is given up: %s", len(text.prompt), reason)

    async def _others(self, num_own: int, patience_s: float | None = None) -> bool:
        """Return whether more than `num_own` requests run or wait, or the server does not say, at all or in time."""
        try:
            async with asyncio.timeout(patience_s):
                num_requests = await self._server.num_requests()
        except TimeoutError:
            self._num_silent += 1
            if self._num_silent < _MAX_SILENT_LOOKS:
                return False
            self._is_in_trouble(f"{self._server.url} does not say any more how many requests run")
            return True
        except ServerError as error:
            self._is_in_trouble(str(error))
            return True
        self._has_answered()
        return num_requests > num_own

    def _has_answered(self) -> None:
        if self._trouble:
            logger.info("%s answers again", self._server.url)
        self._trouble, self._silent_since, self._num_silent = "", None, 0

    def _is_in_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            logger.warning("%s; it is tried again", trouble)
        self._trouble = trouble
        if self._silent_since is None:
            self._silent_since = self._clock()

    def _is_over(self) -> bool:
        """Return whether nothing is left, or the server is given up; texts that rest are left."""
        if self._silent_since is not None and self._clock() - self._silent_since >= ABANDONED_S:
            logger.warning("%s is given up: it has not answered for %.0f s", self._server.url, ABANDONED_S)
            return True
        return not self._texts.counts().open and self._is_quiet()

    def _is_quiet(self) -> bool:
        """Return whether all events that were published so far have arrived."""
        silent_s = self._clock() - max(self._begun, self._texts.heard_at)
        return silent_s >= self._settings.quiet_s and self._is_settled()

    def _hint(self) -> None:
        """Say once that a server publishes events but no donors."""
        known = self._texts.counts()
        if self._has_hinted or known.donors or not known.pages or self._clock() - self._begun < _HINT_AFTER_S:
            return
        self._has_hinted = True
        logger.warning(
            "%s publishes KV events but announces no donors; set announce_donors to true, or there is nothing to heal",
            self._server.url,
        )
