"""The engine for asyncio: one thread runs the model, any number of tasks stream from it.

The event loop only tokenises (in worker threads) and hands parts on. Matching, planning, hashing, grafting and the forward
pass run on the engine's thread, between steps that it takes for all requests together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, Unpack

from kvgraft.engine.assembly import engine_config
from kvgraft.engine.core import Engine, StepEvent
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.request_builder import prompt_length
from kvgraft.engine.snapshot import EngineSnapshot
from kvgraft.errors import CorruptCacheError, KVGraftError, OverloadedError, RequestError, one_line
from kvgraft.tokenising import TextLanes
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from kvgraft.config import EngineConfig
    from kvgraft.engine.inspection import Inspection
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.requests.options import OptionFields
    from kvgraft.engine.requests.request import Request, StreamPart
    from kvgraft.engine.requests.request_builder import Prompt
    from kvgraft.engine.sampling.sampling_params import SamplingParams
    from kvgraft.observability import Recorder
    from kvgraft.types import TokenArray

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

_SHUTTING_DOWN = "the server is shutting down; try another one"
_STOPPED = "the engine has stopped; try another one"
_MAX_STEP_S = 0.25
"""Longest prefill of one step while no stream runs: how long a new request or a cancellation may go unnoticed."""
_LAST_STEP_S = 5.0
"""Seconds that the step in hand may take when the engine is closed without a longer time of grace."""
_IDLE_S = 0.1
"""Seconds between looks for news of stores while there is nothing else to do."""
_REST_S = 0.02
"""Seconds after a step in which nothing is healed: its answer is sent by other threads of this interpreter."""
_RETRY_S = 0.2
"""Seconds until the engine tries again to begin anew, where there was no memory even for that."""
_LEAST_REST_S = 0.002
"""Seconds between looks for a request that is being made."""


class AsyncLLM:
    """A model that serves many requests at once. Its methods belong to one event loop, `snapshot` to any thread.

    Attributes:
        is_stuck: Whether the engine's thread was given up at the end, in the middle of a step.

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
        self._num_preparing = 0
        self._rests_until = 0.0
        self._arriving: set[str] = set()  # requests that are not taken in yet; any thread adds, the engine's removes
        self._lanes = TextLanes()
        self.is_stuck = False
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
        """Reason why this model's K/V cannot be moved (`reuse="graft"` then behaves like `"exact"`), or None."""
        return self._engine.self_check.refusal

    def snapshot(self) -> EngineSnapshot:
        """Return what the engine is doing now; cheap, callable from any thread. Numbers may be of neighbouring moments."""
        return EngineSnapshot.of(self._engine, is_alive=self._thread.is_alive(), is_closing=self._is_closing)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenArray:
        """Turn a prompt into int64 token ids, off the event loop; ids are checked and copied.

        Returns:
            int64 (num_tokens,), the caller's own.

        Raises:
            ConfigError: It is empty, not made of ids in [0, vocab_size), or text without a tokenizer.
        """
        work = partial(self._engine.builder.tokenize, prompt, add_special_tokens=add_special_tokens)
        return await self._lanes.run(prompt_length(prompt), work)

    async def check_length(self, prompt: Prompt) -> None:
        """Raise `ContextLengthError` for a prompt that cannot fit by its length alone; nothing of it is tokenised."""
        await asyncio.to_thread(self._engine.builder.check_length, prompt)

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        reuse: ReuseMode | str = ReuseMode.GRAFT,
        **options: Unpack[OptionFields],
    ) -> Request:
        """Tokenise and check a prompt, off the event loop; arguments and errors as for `LLM.stream`.

        Returns:
            A request for `stream`; the engine holds nothing for it until then.
        """
        return await self.build(prompt, RequestOptions.of(sampling, reuse, **options))

    async def build(self, prompt: Prompt, options: RequestOptions) -> Request:
        """Tokenise and check a prompt, off the event loop.

        Returns:
            A request for `stream`; the engine holds nothing for it until then.

        Raises:
            ConfigError: The prompt is empty or too long, or an option is wrong.
        """
        with self._preparing():
            return await self._build(prompt, options)

    async def _build(self, prompt: Prompt, options: RequestOptions) -> Request:
        builder = self._engine.builder
        # Compiling may take seconds, in which no text would be tokenised; it is kept, so that `build` does not compile again.
        if options.sampling.structure is not None:
            await asyncio.to_thread(builder.compile, options.sampling)
        return await self._lanes.run(prompt_length(prompt), partial(builder.build, prompt, options))

    async def stream(self, request: Request, admitted: Callable[[], None] | None = None) -> AsyncGenerator[StreamPart]:
        """Generate for `request`, a part per token; closing the iterator or cancelling its task cancels the request.

        Args:
            request: What `prepare` made.
            admitted: Called, on the event loop, once the engine has accepted the request and it waits for its turn.

        Raises:
            OverloadedError: Too many requests wait, or the engine is closing or has died.
            ConfigError: An unfinished request has the same id.
            UnknownSessionError: The request's session is not open.
            SessionInUseError: Another turn of it is not done.
            RequestError: The engine failed on this request.
        """
        if self._is_closing:
            raise self._ended or OverloadedError(_SHUTTING_DOWN)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._arriving.add(request.request_id)
        self._command(lambda: self._add(request, stream, admitted), lambda error: stream.put([error]))
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

    async def inspect(self) -> Inspection:
        """Look at requests on their way, donors and prefixes between two steps; the result holds no text.

        Raises:
            OverloadedError: The engine's thread has ended.
        """
        from kvgraft.engine.inspection import Inspection  # loaded where it is asked for

        return await self._call(lambda: Inspection.of(self._engine))

    async def check(self) -> None:
        """Verify every invariant of the K/V bookkeeping between two steps.

        Raises:
            CorruptCacheError: One does not hold. The engine ends its requests and begins anew with nothing cached.
            OverloadedError: The engine's thread has ended.

        Complexity: O(slots + tokens of prefixes and donors), in which no request is served.
        """
        await self._call(self._check)

    async def open_session(
        self, session_id: str = "", *, ttl_s: float | None = None, cache_salt: str = "", owner: str = ""
    ) -> tuple[str, float]:
        """Open a session; returns its id and the seconds after which it is closed if it is idle.

        Args:
            session_id: Its name; empty for a made-up one.
            ttl_s: Seconds, at most and by default `session_ttl_s`.
            cache_salt: That of its turns.
            owner: Client that may use it.

        Raises:
            ConfigError: An argument is wrong, or the id is taken (`SessionInUseError`).
            OverloadedError: As many sessions are open as may be, or the engine's thread has ended.
        """
        name = self._engine.builder.session_name(session_id, owner, cache_salt)
        session = await self._call(lambda: self._engine.sessions.open(name, ttl_s))
        return session.name.session_id, session.ttl_s

    async def close_session(self, session_id: str, *, cache_salt: str = "", owner: str = "") -> None:
        """Forget a session.

        Raises:
            UnknownSessionError: There is none.
            OverloadedError: The engine's thread has ended.
        """
        name = self._engine.builder.session_name(session_id, owner, cache_salt)
        await self._call(lambda: self._engine.sessions.close(name))

    async def reset(self) -> None:
        """Forget all cached prefixes, donors and sessions, on the device and on the host, between two steps.

        Call it after you have changed the model's weights in place. Running requests go on with the K/V that they have, and
        nothing of them is kept; those that wait start afresh.

        Raises:
            OverloadedError: The engine's thread has ended.
        """
        await self._call(self._engine.reset)

    async def close(self, grace_s: float = 0.0) -> None:
        """Accept no more requests, let the others finish for `grace_s` seconds, fail the rest and stop the thread.

        A thread that does not come to the end of its step in what is left of that time, five seconds at least, is left
        alone: `is_stuck` says so, and the process should end by `os._exit`.

        Args:
            grace_s: Seconds; 0 fails what is not done at once.
        """
        self._is_closing = True
        clock = asyncio.get_running_loop().time
        deadline = clock() + grace_s
        while self._thread.is_alive() and self._engine.has_work and clock() < deadline:
            await asyncio.sleep(0.02)
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, max(deadline - clock(), _LAST_STEP_S))
        self.is_stuck = self._thread.is_alive()
        if self.is_stuck:
            logger.critical("the engine does not end its step; it is given up, and what waits to be stored is lost")
            self._fail_all(OverloadedError(_SHUTTING_DOWN))
            return
        await asyncio.to_thread(self._engine.close)

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the engine's thread, between steps, and return what it returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def succeed(result: Result) -> None:
            if not done.done():
                done.set_result(result)

        def fail(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                _call_on(loop, partial(fail, error))
            else:
                _call_on(loop, partial(succeed, result))

        self._command(run, lambda error: _call_on(loop, partial(fail, error)))
        return await done

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
            while not self._is_stopped:
                try:
                    if self._obey_commands():
                        self._work()
                except Exception as error:
                    logger.exception("the engine's thread failed between steps; all requests end")
                    self._recover(error)
        except BaseException:
            logger.critical("the engine's thread died; all requests fail", exc_info=True)
            raise
        finally:
            self._end(OverloadedError(_SHUTTING_DOWN if self._is_stopped else _STOPPED))

    def _work(self) -> None:
        """Take a step, or do a piece of what no request waits for."""
        engine = self._engine
        if engine.has_work:
            self._deliver(engine.step())
            self._rests_until = time.monotonic() + _REST_S
            if engine.is_broken:
                time.sleep(_RETRY_S)
            return
        engine.poll_stores()
        if engine.auditor.has_work:
            engine.audit_step()
        else:
            self._heal()

    def _recover(self, error: Exception) -> None:
        """End all requests after a failure that is no step's, so that none waits for ever; what is cached is verified."""
        try:
            self._deliver(self._engine.end_all(error))
        except Exception:
            logger.exception("the engine cannot recover yet")
            self._engine.doubt(CorruptCacheError("requests could not be ended"))
            time.sleep(_RETRY_S)
        failure = RequestError(f"the engine failed while it served this request: {one_line(error)}; send it again")
        for stream in list(self._streams.values()):
            stream.put([failure])
        self._streams.clear()

    def _obey_commands(self) -> bool:
        """Run what was asked meanwhile; waits while there is nothing to do. False when it is time to stop.

        A command that fails reports it to its caller; the others are obeyed.
        """
        stores = self._engine.stores
        idle_s = None if stores is None else 0.0 if stores.is_behind else _IDLE_S
        with self._wake:
            has_work = self._engine.has_work or self._engine.auditor.has_work or self._engine.healer.has_work
            is_due = self._commands or has_work or self._is_stopped
            while not is_due:
                self._wake.wait(idle_s)
                is_due = self._commands or self._is_stopped or idle_s is not None
        while self._commands:
            command = self._commands.popleft()
            try:
                command.run()
            except KVGraftError as error:
                command.fail(error)
            except Exception as error:
                self._engine.doubt(error)
                logger.exception("the engine cannot take a request")
                command.fail(RequestError(f"the engine cannot take this request: {one_line(error)}"))
        return not self._is_stopped

    def _check(self) -> None:
        try:
            self._engine.check()
        except Exception as error:
            self._deliver(self._engine.end_all(error))
            raise

    def _is_wanted(self) -> bool:
        """Return whether a request waits to be taken in, or the engine is to end; questions about its state can wait."""
        return self._is_stopped or bool(self._arriving) or self._num_preparing > 0

    def _heal(self) -> None:
        """Heal a piece, unless an answer is just on its way out or a request on its way in: both need the interpreter."""
        rest = self._rests_until - time.monotonic()
        if rest <= 0 and not self._is_wanted():
            self._engine.heal_step(self._is_wanted)
            return
        with self._wake:
            if not self._commands and not self._is_stopped:
                self._wake.wait(min(_REST_S, max(rest, _LEAST_REST_S)))

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """Count a request that is being made, on an event loop's thread."""
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def _add(self, request: Request, stream: _Stream, admitted: Callable[[], None] | None) -> None:
        self._arriving.discard(request.request_id)
        self._engine.add(request)
        self._streams[request.request_id] = stream
        if admitted is not None:
            _call_on(stream.loop, admitted)

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
            stream = self._streams.get(event.request_id)
            if stream is None:  # it has ended with an error before
                continue
            if event.error is not None or (event.part is not None and event.part.output is not None):
                del self._streams[event.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, items in by_loop.items():
            _post(loop, items)

    def _end(self, error: OverloadedError) -> None:
        self._fail_all(error)
        self._engine.cancel_all()

    def _fail_all(self, error: OverloadedError) -> None:
        """Fail all that wait: streams, commands that were not obeyed, and all later ones."""
        self._is_closing = True
        with self._wake:
            self._ended = error
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command.fail(error)
        for stream in list(self._streams.values()):
            stream.put([error])
        self._streams.clear()


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do on the engine's thread, and its answer if it cannot be done."""

    run: Callable[[], None]
    fail: Callable[[KVGraftError], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Queue for the parts of one request, and its event loop."""

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
    """Have an event loop call `function`, from any thread; a closed loop is left alone."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _ignore(_: KVGraftError) -> None:
    """Drop an error: no caller waits for it."""
