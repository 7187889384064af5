"""The engine behind asyncio: one thread runs the model, any number of tasks stream from it.

The event loop only tokenises (in worker threads) and hands parts on. Matching, planning, hashing, grafting and the forward
pass run on the engine's thread, between steps that it takes for all requests together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.engine.assembly import engine_config
from kvgraft.engine.core import Engine, StepEvent
from kvgraft.errors import KVGraftError, OverloadedError, RequestError, one_line
from kvgraft.types import UNCALIBRATED, ReuseMode, RiskStatement

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from kvgraft.config import EngineConfig
    from kvgraft.engine.loading import LoadedModel
    from kvgraft.engine.request import Request, StreamPart
    from kvgraft.engine.request_builder import Prompt
    from kvgraft.engine.sampling import SamplingParams
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.memory import SlotUsage
    from kvgraft.observability import Recorder

logger = logging.getLogger(__name__)

_SHUTTING_DOWN = "the server is shutting down; try another one"
_STOPPED = "the engine has stopped; try another one"
_MAX_STEP_S = 0.25
"""Longest prefill of one step while no stream runs: how long a new request or a cancellation may go unnoticed."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine is doing.

    Attributes:
        is_alive: Whether its thread runs.
        is_closing: Whether it accepts no more requests.
        num_running: Admitted requests.
        num_waiting: Requests that wait for admission.
        usage: K/V slots by holder.
        window_usage: Slots of window layers by holder, where these have slots of their own.
        num_donors: Donors in all tiers.
        donor_tokens: Their tokens.
        host_bytes: Bytes of donors in host memory.
        num_errors: Lookups, grafts and publications that failed and became misses.
        num_preemptions: Requests that lost their slots and were computed again, counted each time.
        attention: The attention backend and why it was chosen.
        risk: What may be said about grafts of reuse classes that were never audited.
        class_risks: What may be said about grafts by reuse class, of those that were audited.
        num_pending_audits: Requests that wait for their audit.
        num_left_out_audits: Sampled requests that were not audited.
    """

    is_alive: bool
    is_closing: bool
    num_running: int
    num_waiting: int
    usage: SlotUsage
    window_usage: SlotUsage | None
    num_donors: int
    donor_tokens: int
    host_bytes: int
    num_errors: int
    num_preemptions: int
    attention: str
    risk: RiskStatement = UNCALIBRATED
    class_risks: Mapping[str, RiskStatement] = field(default_factory=dict)
    num_pending_audits: int = 0
    num_left_out_audits: int = 0


class AsyncLLM:
    """A model that serves many requests at once. Its methods belong to one event loop, `snapshot` to anybody.

    Example:
        >>> llm = AsyncLLM("graft-tiny")
        >>> request = await llm.prepare("def main():", SamplingParams(32))
        >>> async for part in llm.stream(request):
        ...     print(part.text, end="")
        >>> await llm.close()
    """

    def __init__(
        self,
        model: str | LoadedModel = "graft-tiny",
        config: EngineConfig | None = None,
        recorder: Recorder | None = None,
        **settings: object,
    ) -> None:
        """Load `model` and start the engine's thread; takes as long as loading does. Arguments and errors as for `LLM`."""
        config = engine_config(config, settings)
        self._streams: dict[str, _Stream] = {}
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._ended: OverloadedError | None = None
        self._is_closing = False
        self._is_stopped = False
        # The engine is made on the thread that steps it: OpenMP keeps a team of workers for every thread that computes, and
        # two teams on the same cores made decode steps 2.4 times slower.
        loaded: queue.SimpleQueue[Engine | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=lambda: self._load_and_run(loaded, model, config, recorder), name="kvgraft-engine", daemon=True
        )
        self._thread.start()
        engine = loaded.get()
        if isinstance(engine, BaseException):
            self._thread.join()
            raise engine

    @property
    def config(self) -> EngineConfig:
        """Settings that the engine runs with, defaults filled in."""
        return self._engine.config

    @property
    def loaded(self) -> LoadedModel:
        """The model, its tokenizer and its fingerprint."""
        return self._engine.loaded

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together: the model's limit, or the pool's if that is smaller."""
        return self._engine.builder.longest

    @property
    def graft_refusal(self) -> str | None:
        """Why this model's K/V cannot be moved (`reuse="graft"` then behaves like `"exact"`), or None."""
        return self._engine.self_check.refusal

    def snapshot(self) -> EngineSnapshot:
        """What the engine is doing now; cheap, callable from any thread. Numbers may be of neighbouring moments."""
        engine = self._engine
        return EngineSnapshot(
            is_alive=self._thread.is_alive(),
            is_closing=self._is_closing,
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            usage=engine.space.usage(),
            window_usage=engine.space.window_usage(),
            num_donors=len(engine.space.donors),
            donor_tokens=engine.space.donors.num_tokens,
            host_bytes=engine.space.host.used_bytes,
            num_errors=engine.manager.num_errors,
            num_preemptions=engine.scheduler.num_preemptions,
            attention=engine.adapter.attention.reason,
            risk=engine.risk.start,
            class_risks=engine.risk.statements(),
            num_pending_audits=engine.auditor.num_pending,
            num_left_out_audits=engine.auditor.num_left_out,
        )

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        *,
        cache_salt: str = "",
        selection: str | SelectionPolicy | None = None,
        correction: str | DriftCorrection | None = None,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> Request:
        """Tokenise and check a prompt, off the event loop; arguments as for `LLM.generate`.

        Raises:
            ConfigError: The prompt is empty or too long, or an argument is wrong.
        """
        return await asyncio.to_thread(
            self._engine.builder.build,
            prompt,
            sampling,
            reuse,
            cache_salt=cache_salt,
            selection=selection,
            correction=correction,
            request_id=request_id,
            add_special_tokens=add_special_tokens,
        )

    async def stream(self, request: Request) -> AsyncGenerator[StreamPart]:
        """Generate for `request`, a part per token; closing the iterator or cancelling its task cancels the request.

        Raises:
            OverloadedError: Too many requests wait, or the engine is closing or has died.
            ConfigError: An unfinished request has the same id.
            RequestError: The engine failed on this request.
        """
        if self._is_closing:
            raise self._ended or OverloadedError(_SHUTTING_DOWN)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._command(lambda: self._add(request, stream), lambda error: stream.put([error]))
        try:
            while True:
                item = await stream.items.get()
                if isinstance(item, KVGraftError):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            self._command(lambda: self._cancel(request.request_id, stream), _ignore)

    async def check(self) -> None:
        """Verify every invariant of the K/V bookkeeping between two steps.

        Raises:
            CorruptCacheError: One does not hold.
            OverloadedError: The engine's thread has ended.
        """
        await self._call(self._engine.space.check)

    async def reset(self) -> None:
        """Forget all cached prefixes and donors, on the device and on the host, between two steps.

        Call it after you have changed the model's weights in place. Running requests go on with the K/V that they have, and
        nothing of them is kept; those that wait start afresh.

        Raises:
            OverloadedError: The engine's thread has ended.
        """
        await self._call(self._engine.reset)

    async def close(self, grace_s: float = 0.0) -> None:
        """Accept no more requests, let the others finish for `grace_s` seconds, fail the rest and stop the thread."""
        self._is_closing = True
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._thread.is_alive() and self._engine.has_work and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def _call(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine's thread, between steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def run() -> None:
            error: Exception | None = None
            try:
                function()
            except Exception as failure:  # noqa: BLE001 - it belongs to whoever asked
                error = failure
            _call_on(loop, lambda: settle(error))

        self._command(run, lambda error: _call_on(loop, lambda: settle(error)))
        await done

    def _command(self, run: Callable[[], None], fail: Callable[[KVGraftError], object]) -> None:
        """Have `run` called on the engine's thread, or `fail` with the reason why it was not."""
        with self._wake:
            ended = self._ended
            if ended is None:
                self._commands.append(_Command(run, fail))
                self._wake.notify()
        if ended is not None:
            fail(ended)

    # What follows runs on the engine's thread.

    def _load_and_run(
        self,
        loaded: queue.SimpleQueue[Engine | BaseException],
        model: str | LoadedModel,
        config: EngineConfig,
        recorder: Recorder | None,
    ) -> None:
        try:
            self._engine = Engine(model, config, recorder=recorder, max_step_s=_MAX_STEP_S)
        except BaseException as error:  # noqa: BLE001 - raised again where the engine was asked for
            loaded.put(error)
        else:
            loaded.put(self._engine)
            self._run()

    def _run(self) -> None:
        try:
            while self._obey_commands():
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                else:
                    self._engine.audit_step()
        except BaseException:
            logger.critical("the engine's thread died; all requests fail", exc_info=True)
            raise
        finally:
            self._end(OverloadedError(_SHUTTING_DOWN if self._is_stopped else _STOPPED))

    def _obey_commands(self) -> bool:
        """Run what was asked meanwhile; waits while there is nothing to do. False when it is time to stop.

        A command that fails tells whoever gave it; the others are obeyed.
        """
        with self._wake:
            while not (self._commands or self._engine.has_work or self._engine.auditor.has_work or self._is_stopped):
                self._wake.wait()
        while self._commands:
            command = self._commands.popleft()
            try:
                command.run()
            except KVGraftError as error:
                command.fail(error)
            except Exception as error:
                logger.exception("the engine cannot take a request")
                command.fail(RequestError(f"the engine cannot take this request: {one_line(error)}"))
        return not self._is_stopped

    def _add(self, request: Request, stream: _Stream) -> None:
        self._engine.add(request)
        self._streams[request.request_id] = stream

    def _cancel(self, request_id: str, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.cancel(request_id)

    def _deliver(self, events: list[StepEvent]) -> None:
        """Hand the parts of one step to their streams, one call per event loop rather than one per part."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, StreamPart | KVGraftError]]] = {}
        for event in events:
            item = event.error or event.part
            assert item is not None
            stream = self._streams[event.request_id]
            if event.error is not None or (event.part is not None and event.part.output is not None):
                del self._streams[event.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, items in by_loop.items():
            _post(loop, items)

    def _end(self, error: OverloadedError) -> None:
        """Tell everybody that nothing more will come: streams, commands that were not obeyed, and all later ones."""
        self._is_closing = True
        with self._wake:
            self._ended = error
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command.fail(error)
        for stream in self._streams.values():
            stream.put([error])
        self._streams.clear()
        self._engine.cancel_all()


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do on the engine's thread, and who is told if it cannot be done."""

    run: Callable[[], None]
    fail: Callable[[KVGraftError], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Where the parts of one request go."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[StreamPart | KVGraftError]

    def put(self, items: list[StreamPart | KVGraftError]) -> None:
        _post(self.loop, [(self, item) for item in items])


def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, StreamPart | KVGraftError]]) -> None:
    def put_all() -> None:
        for stream, item in items:
            stream.items.put_nowait(item)

    _call_on(loop, put_all)


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Have an event loop call `function`, from any thread; nobody is left to be told if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _ignore(_: KVGraftError) -> None:
    """Nobody waits for an answer."""
