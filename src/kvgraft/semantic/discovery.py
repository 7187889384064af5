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
    """Counters of texts and questions."""

    embedded: int = 0
    """Texts and prompts that got their vector."""
    dropped: int = 0
    """Those that found the queue full."""
    errors: int = 0
    answered: int = 0
    """Questions answered from a vector that was ready."""
    not_ready: int = 0
    """Questions without an answer."""


class _EmbedTask(NamedTuple):
    """Something to do for the thread: embed a prompt, embed and store a text, or forget one."""

    namespace: Hashable
    key: tuple[Hashable] | None
    """Of the text; None of a prompt."""
    tokens: Tokens | None
    """To embed; None to forget."""


@dataclass(slots=True)
class _Corpus:
    """Texts and vectors between two resets; work that still goes on for an earlier corpus is lost."""

    index: CosineIndex
    vectors: ReadyVectors
    index_lock: threading.Lock = field(default_factory=threading.Lock)
    texts: dict[tuple[Hashable, Hashable], Tokens] = field(default_factory=dict)
    waiting: deque[_EmbedTask] = field(default_factory=deque)
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
        self._corpus = self._new_corpus()
        self._thread: threading.Thread | None = None
        self._is_busy = self._is_closed = False
        self._problems: set[str] = set()
        _OPEN.add(self)

    @property
    def embedder(self) -> Embedder:
        """Maker of the vectors."""
        return self._embedder

    def __len__(self) -> int:
        """Number of texts, those included that wait to be embedded."""
        return len(self._corpus.texts)

    def add(self, namespace: Hashable, key: Hashable, token_ids: Tokens) -> bool:
        """Have a text embedded and stored under `key`, in place of one that is there; False if the queue is full."""
        with self._changed:
            corpus = self._corpus
            self._forget(corpus, namespace, key)
            corpus.texts[namespace, key] = token_ids
            if self._queue(_EmbedTask(namespace, (key,), token_ids)):
                return True
            self._forget(corpus, namespace, key)
            return False

    def remove(self, namespace: Hashable, key: Hashable) -> None:
        """Forget a text, if it is there."""
        with self._changed:
            self._forget(self._corpus, namespace, key)

    def text(self, namespace: Hashable, key: Hashable) -> Tokens | None:
        """Return the tokens of a text, or None if it is gone."""
        return self._corpus.texts.get((namespace, key))

    def start(self, namespace: Hashable, token_ids: Tokens) -> None:
        """Have a prompt embedded, because it will soon be asked for."""
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
        corpus, digests = self._corpus, content_digests(token_ids)
        vector = self._vector(corpus, namespace, token_ids, digests, patience_s)
        found = None if vector is None else self._search(corpus, namespace, vector, k, min_similarity)
        with self._changed:
            if found is None:
                self.counters.not_ready += 1
                return None
            self.counters.answered += 1
            return [each for each in found if (namespace, each.key) in self._corpus.texts and corpus is self._corpus]

    def reset(self) -> None:
        """Forget everything; what is being embedded comes to nothing."""
        with self._changed:
            self._corpus = self._new_corpus()

    def close(self) -> None:
        """End the thread; nothing is embedded any more. Waits for the text under way, some seconds at most."""
        with self._changed:
            self._is_closed = True
            self._corpus.waiting.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is embedded, for tests and measurements; False if it was not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._corpus.waiting or self._is_busy), timeout_s)

    def check(self) -> None:
        """Verify the index; raises `CorruptCacheError`."""
        with self._corpus.index_lock:
            self._corpus.index.check()

    def _new_corpus(self) -> _Corpus:
        return _Corpus(CosineIndex(self._embedder.dimensions, self._capacity), ReadyVectors(self._max_ready))

    def _forget(self, corpus: _Corpus, namespace: Hashable, key: Hashable) -> None:
        """Forget a text now, and its vector when the thread comes to it."""
        if corpus.texts.pop((namespace, key), None) is not None:
            self._queue(_EmbedTask(namespace, (key,), None))

    def _queue(self, task: _EmbedTask) -> bool:
        """Hand a task over; False if there are too many. Forgetting is never dropped."""
        if self._is_closed:
            return False
        waiting = self._corpus.waiting
        if task.tokens is not None and len(waiting) >= self._max_waiting:
            self.counters.dropped += 1
            return False
        # Prompts first: their requests may still be served.
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
            corpus = self._corpus
            name = (namespace, digests.whole)
            if name in corpus.started or corpus.vectors.of_text(namespace, digests) is not None:
                return
            if self._queue(_EmbedTask(namespace, None, token_ids)):
                corpus.started.add(name)

    def _vector(
        self, corpus: _Corpus, namespace: Hashable, token_ids: Tokens, digests: Digests, patience_s: float
    ) -> Vectors | None:
        """A vector for a question: the prompt's, made in place if that is quick, or its beginning's."""
        with self._changed:
            vector = corpus.vectors.of_text(namespace, digests)
            if vector is not None:
                return vector
        if self._embedder.is_quick:
            return self._embedded(corpus, namespace, token_ids, digests)
        self._start(namespace, token_ids, digests)
        with self._changed:
            if patience_s > 0:
                name = (namespace, digests.whole)
                self._changed.wait_for(lambda: name not in corpus.started or self._is_closed, patience_s)
            vector = corpus.vectors.of_text(namespace, digests)
            return corpus.vectors.of_beginning(namespace, digests) if vector is None else vector

    def _search(
        self, corpus: _Corpus, namespace: Hashable, vector: Vectors, k: int, min_similarity: float
    ) -> list[Neighbour] | None:
        if not corpus.index_lock.acquire(timeout=_LOCK_S):
            return None
        try:
            return corpus.index.search(namespace, vector, k, min_similarity)
        finally:
            corpus.index_lock.release()

    def _embedded(self, corpus: _Corpus, namespace: Hashable, token_ids: Tokens, digests: Digests) -> Vectors | None:
        """Embed and remember; None if that fails or the text has nothing to compare."""
        try:
            vector: Vectors = self._embedder.embed([token_ids.astype(np.int64, copy=False)])[0]
        except Exception as error:  # noqa: BLE001 - counted, logged, and a question without an answer
            self._note(error)
            return None
        with self._changed:
            self.counters.embedded += 1
            corpus.vectors.put(namespace, digests, vector)
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
            corpus, task = work
            try:
                self._do(corpus, task)
            except Exception as error:  # noqa: BLE001 - the next text may do
                self._note(error)

    def _next(self) -> tuple[_Corpus, _EmbedTask] | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._corpus.waiting or self._is_closed, _IDLE_S)
            if self._is_closed or not self._corpus.waiting:
                self._thread = None
                return None
            self._is_busy = True
            return self._corpus, self._corpus.waiting.popleft()

    def _do(self, corpus: _Corpus, task: _EmbedTask) -> None:
        if task.tokens is None:
            assert task.key is not None
            with corpus.index_lock:
                corpus.index.remove(task.namespace, *task.key)
            return
        if task.key is not None and self._embedder.learn(task.tokens.astype(np.int64, copy=False)):
            self._embed_anew(corpus)
        digests = content_digests(task.tokens)
        with self._changed:
            vector = corpus.vectors.of_text(task.namespace, digests)
        if vector is None:
            vector = self._embedded(corpus, task.namespace, task.tokens, digests)
        with self._changed:
            corpus.started.discard((task.namespace, digests.whole))
            self._changed.notify_all()
        if task.key is None:
            return
        if vector is not None and vector.any():
            self._store(corpus, task.namespace, *task.key, task.tokens, vector)
        else:
            self._drop(corpus, task.namespace, *task.key, task.tokens)

    def _drop(self, corpus: _Corpus, namespace: Hashable, key: Hashable, tokens: Tokens) -> None:
        """Forget a text that has no vector: nothing would ever evict it."""
        with self._changed:
            if corpus.texts.get((namespace, key)) is tokens:
                del corpus.texts[namespace, key]

    def _embed_anew(self, corpus: _Corpus) -> None:
        """Replace the vectors of all texts; until that is done, questions are compared with some of the old ones."""
        with self._changed:
            corpus.vectors = ReadyVectors(self._max_ready)
            texts = list(corpus.texts.items())
        for (namespace, key), tokens in texts:
            if (namespace, key) in corpus.index and not self._is_closed and corpus is self._corpus:
                vector = self._embedded(corpus, namespace, tokens, content_digests(tokens))
                if vector is not None and vector.any():
                    self._store(corpus, namespace, key, tokens, vector)

    def _store(self, corpus: _Corpus, namespace: Hashable, key: Hashable, tokens: Tokens, vector: Vectors) -> None:
        with self._changed:
            if corpus.texts.get((namespace, key)) is not tokens:
                return
        with corpus.index_lock:
            evicted = corpus.index.add(namespace, key, vector)
        with self._changed:
            for entry in evicted:
                corpus.texts.pop(entry, None)


_OPEN: weakref.WeakSet[Discovery] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Let no thread compute while the interpreter ends."""
    for discovery in list(_OPEN):
        discovery.close()
