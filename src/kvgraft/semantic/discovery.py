"""Embed texts beside the requests, and answer from what is ready."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvgraft.errors import one_line
from kvgraft.semantic.index import CosineIndex, Neighbour
from kvgraft.semantic.ready import Digests, ReadyVectors, content_digests

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from kvgraft.semantic.base import Embedder, Vectors

    Tokens = NDArray[np.integer[Any]]

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
"""The thread ends when there was nothing to do for so long; the next text starts another."""

_LOCK_S = 0.002
"""Longest that a caller waits for the index. Only while a graph is built of very many vectors is it busy for longer."""

_CLOSE_S = 10.0


@dataclass(slots=True)
class DiscoveryCounters:
    """What became of texts and questions.

    Attributes:
        embedded: Texts and prompts that got their vector.
        dropped: Those that found the queue full.
        errors: Those that the embedder failed on.
        answered: Questions answered from a vector that was ready.
        not_ready: Questions without an answer.
    """

    embedded: int = 0
    dropped: int = 0
    errors: int = 0
    answered: int = 0
    not_ready: int = 0


class _Task(NamedTuple):
    """Something to do for the thread: embed a prompt, embed and store a text, or forget one.

    Attributes:
        namespace: Whose it is.
        key: Of the text; None of a prompt.
        tokens: To embed; None to forget.
    """

    namespace: Hashable
    key: tuple[Hashable] | None
    tokens: Tokens | None


@dataclass(slots=True)
class _State:
    """All that is known between two resets; what still works on the state of before works for nothing."""

    index: CosineIndex
    vectors: ReadyVectors
    index_lock: threading.Lock = field(default_factory=threading.Lock)
    texts: dict[tuple[Hashable, Hashable], Tokens] = field(default_factory=dict)
    waiting: deque[_Task] = field(default_factory=deque)
    started: set[tuple[Hashable, bytes]] = field(default_factory=set)


class Discovery:
    """Finds stored texts that resemble a prompt, off the path of requests. Thread-safe.

    A thread embeds what `add` and `start` hand over, prompts first; a caller waits for it only as long as it says.
    `ready` answers from a vector that is there, the prompt's or that of its beginning, and starts the prompt's own
    otherwise: it is there for the prompt's next chunk or for the next request that asks. Embedders that are quick embed
    a prompt in place instead.

    Texts are the keys' owners' to choose and to take away again; a text that was removed is never an answer. What is
    full drops, what fails is counted and logged: no question raises because of the embedder.

    Token arrays are kept as they are and must not change.
    """

    def __init__(
        self, embedder: Embedder, *, capacity: int = 100_000, max_waiting: int = 1_024, max_ready: int = 8_192
    ) -> None:
        """Prepare; the thread starts with the first text.

        Args:
            embedder: Makes the vectors.
            capacity: Most texts, of all namespaces together; the least recently used leaves.
            max_waiting: Most texts and prompts that wait to be embedded; more are dropped.
            max_ready: Most vectors of prompts and texts that are kept for `ready`.
        """
        self.counters = DiscoveryCounters()
        self._embedder = embedder
        self._capacity, self._max_waiting, self._max_ready = capacity, max_waiting, max_ready
        self._changed = threading.Condition()
        self._state = self._new_state()
        self._thread: threading.Thread | None = None
        self._is_busy = self._is_closed = False
        self._problems: set[str] = set()
        _OPEN.add(self)

    @property
    def embedder(self) -> Embedder:
        """What makes the vectors."""
        return self._embedder

    def __len__(self) -> int:
        """Number of texts, those included that wait to be embedded."""
        return len(self._state.texts)

    def add(self, namespace: Hashable, key: Hashable, token_ids: Tokens) -> bool:
        """Have a text embedded and stored under `key`, in place of one that is there; False if the queue is full."""
        with self._changed:
            state = self._state
            self._forget(state, namespace, key)
            state.texts[namespace, key] = token_ids
            if self._queue(_Task(namespace, (key,), token_ids)):
                return True
            self._forget(state, namespace, key)
            return False

    def remove(self, namespace: Hashable, key: Hashable) -> None:
        """Forget a text, if it is there."""
        with self._changed:
            self._forget(self._state, namespace, key)

    def text(self, namespace: Hashable, key: Hashable) -> Tokens | None:
        """Return the tokens of a text, or None if it is gone."""
        return self._state.texts.get((namespace, key))

    def start(self, namespace: Hashable, token_ids: Tokens) -> None:
        """Have a prompt embedded, because somebody will soon ask for it."""
        self._start(namespace, token_ids, content_digests(token_ids))

    def ready(
        self,
        namespace: Hashable,
        token_ids: Tokens,
        *,
        k: int = 8,
        min_similarity: float = 0.0,
        patience_s: float = 0.0,
    ) -> list[Neighbour] | None:
        """Find texts that resemble a prompt, if that can be said at once; otherwise it is started.

        Args:
            namespace: Only its texts are considered.
            token_ids: The prompt.
            k: Most texts to return.
            min_similarity: Least cosine.
            patience_s: Longest to wait for the prompt's vector.

        Returns:
            Nearest first, or None if the prompt has no vector yet.
        """
        state, digests = self._state, content_digests(token_ids)
        vector = self._vector(state, namespace, token_ids, digests, patience_s)
        found = None if vector is None else self._search(state, namespace, vector, k, min_similarity)
        with self._changed:
            if found is None:
                self.counters.not_ready += 1
                return None
            self.counters.answered += 1
            return [each for each in found if (namespace, each.key) in self._state.texts and state is self._state]

    def reset(self) -> None:
        """Forget everything; what is being embedded comes to nothing."""
        with self._changed:
            self._state = self._new_state()

    def close(self) -> None:
        """End the thread; nothing is embedded any more. Waits for the text under way, some seconds at most."""
        with self._changed:
            self._is_closed = True
            self._state.waiting.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is embedded, for tests and measurements; False if it was not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._state.waiting or self._is_busy), timeout_s)

    def check(self) -> None:
        """Verify the index.

        Raises:
            CorruptCacheError: The first invariant that does not hold.
        """
        with self._state.index_lock:
            self._state.index.check()

    def _new_state(self) -> _State:
        return _State(CosineIndex(self._embedder.dimensions, self._capacity), ReadyVectors(self._max_ready))

    def _forget(self, state: _State, namespace: Hashable, key: Hashable) -> None:
        """Forget a text now, and its vector when the thread comes to it."""
        if state.texts.pop((namespace, key), None) is not None:
            self._queue(_Task(namespace, (key,), None))

    def _queue(self, task: _Task) -> bool:
        """Hand a task over; False if there are too many. Forgetting is never dropped."""
        if self._is_closed:
            return False
        waiting = self._state.waiting
        if task.tokens is not None and len(waiting) >= self._max_waiting:
            self.counters.dropped += 1
            return False
        # Prompts first: somebody may still be served by them.
        waiting.append(task) if task.key is not None else waiting.appendleft(task)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvgraft-embedder", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread can be had now; the next text asks again
                self._note(error)
                return True
            self._thread = thread
        self._changed.notify_all()
        return True

    def _start(self, namespace: Hashable, token_ids: Tokens, digests: Digests) -> None:
        with self._changed:
            state = self._state
            name = (namespace, digests.whole)
            if name in state.started or state.vectors.of_text(namespace, digests) is not None:
                return
            if self._queue(_Task(namespace, None, token_ids)):
                state.started.add(name)

    def _vector(
        self, state: _State, namespace: Hashable, token_ids: Tokens, digests: Digests, patience_s: float
    ) -> Vectors | None:
        """A vector for a question: the prompt's, made in place if that is quick, or its beginning's."""
        with self._changed:
            vector = state.vectors.of_text(namespace, digests)
            if vector is not None:
                return vector
        if self._embedder.is_quick:
            return self._embedded(state, namespace, token_ids, digests)
        self._start(namespace, token_ids, digests)
        with self._changed:
            if patience_s > 0:
                name = (namespace, digests.whole)
                self._changed.wait_for(lambda: name not in state.started or self._is_closed, patience_s)
            vector = state.vectors.of_text(namespace, digests)
            return state.vectors.of_beginning(namespace, digests) if vector is None else vector

    def _search(
        self, state: _State, namespace: Hashable, vector: Vectors, k: int, min_similarity: float
    ) -> list[Neighbour] | None:
        if not state.index_lock.acquire(timeout=_LOCK_S):
            return None
        try:
            return state.index.search(namespace, vector, k, min_similarity)
        finally:
            state.index_lock.release()

    def _embedded(self, state: _State, namespace: Hashable, token_ids: Tokens, digests: Digests) -> Vectors | None:
        """Embed and remember; None if that fails or the text has nothing to compare."""
        try:
            vector: Vectors = self._embedder.embed([token_ids.astype(np.int64, copy=False)])[0]
        except Exception as error:  # noqa: BLE001 - counted, logged, and a question without an answer
            self._note(error)
            return None
        with self._changed:
            self.counters.embedded += 1
            state.vectors.put(namespace, digests, vector)
        return vector

    def _note(self, error: Exception) -> None:
        """Count a failure; log each kind once with its traceback."""
        with self._changed:
            self.counters.errors += 1
            problem = one_line(error)
            is_new = problem not in self._problems and len(self._problems) < self._max_waiting
            self._problems.add(problem)
        if is_new:
            logger.error(
                "embedder %r failed: %s; texts like this one are not found",
                self._embedder.name,
                problem,
                exc_info=error,
            )

    def _work(self) -> None:
        """Do what waits until there was nothing for a while."""
        while (work := self._next()) is not None:
            state, task = work
            try:
                self._do(state, task)
            except Exception as error:  # noqa: BLE001 - the next text may do
                self._note(error)

    def _next(self) -> tuple[_State, _Task] | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state.waiting or self._is_closed, _IDLE_S)
            if self._is_closed or not self._state.waiting:
                self._thread = None
                return None
            self._is_busy = True
            return self._state, self._state.waiting.popleft()

    def _do(self, state: _State, task: _Task) -> None:
        if task.tokens is None:
            assert task.key is not None
            with state.index_lock:
                state.index.remove(task.namespace, *task.key)
            return
        if task.key is not None and self._embedder.learn(task.tokens.astype(np.int64, copy=False)):
            self._embed_anew(state)
        digests = content_digests(task.tokens)
        with self._changed:
            vector = state.vectors.of_text(task.namespace, digests)
        if vector is None:
            vector = self._embedded(state, task.namespace, task.tokens, digests)
        with self._changed:
            state.started.discard((task.namespace, digests.whole))
            self._changed.notify_all()
        if task.key is None:
            return
        if vector is not None and vector.any():
            self._store(state, task.namespace, *task.key, task.tokens, vector)
        else:
            self._drop(state, task.namespace, *task.key, task.tokens)

    def _drop(self, state: _State, namespace: Hashable, key: Hashable, tokens: Tokens) -> None:
        """Forget a text that has no vector: nothing would ever evict it."""
        with self._changed:
            if state.texts.get((namespace, key)) is tokens:
                del state.texts[namespace, key]

    def _embed_anew(self, state: _State) -> None:
        """Replace the vectors of all texts; until that is done, questions are compared with some of the old ones."""
        with self._changed:
            state.vectors = ReadyVectors(self._max_ready)
            texts = list(state.texts.items())
        for (namespace, key), tokens in texts:
            if (namespace, key) in state.index and not self._is_closed and state is self._state:
                vector = self._embedded(state, namespace, tokens, content_digests(tokens))
                if vector is not None and vector.any():
                    self._store(state, namespace, key, tokens, vector)

    def _store(self, state: _State, namespace: Hashable, key: Hashable, tokens: Tokens, vector: Vectors) -> None:
        with self._changed:
            if state.texts.get((namespace, key)) is not tokens:
                return
        with state.index_lock:
            evicted = state.index.add(namespace, key, vector)
        with self._changed:
            for entry in evicted:
                state.texts.pop(entry, None)


_OPEN: weakref.WeakSet[Discovery] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Let no thread compute while the interpreter ends."""
    for discovery in list(_OPEN):
        discovery.close()
