"""Compiled structures of a model, once each; what compiles them (`grammar_compiler`) is loaded with the first one."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from kvgraft.engine.sampling.structure import MAX_CHARS
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.sampling.grammar_compiler import GrammarCompiler
    from kvgraft.engine.sampling.structure import Structure, StructureSpec

MAX_KEPT = 64
"""Compiled structures that are kept, those used last."""


class Grammars:
    """Compiles for one model. Any thread may use it."""

    def __init__(self, loaded: LoadedModel, eos_token_ids: Collection[int]) -> None:
        self._loaded = loaded
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._backend_lock = Lock()
        self._compiled: OrderedDict[StructureSpec, Future[Structure]] = OrderedDict()

    def compile(self, spec: StructureSpec) -> Structure:
        """Return what `spec` says, compiled. Equal ones are compiled once, also when several threads ask at a time.

        Raises:
            ConfigError: It cannot be compiled, or not for this model; the message says why.
            ImportError: The extra `structured` is not installed.
        """
        if len(spec.source) > MAX_CHARS:
            raise ConfigError(f"a structure has at most {MAX_CHARS} characters, not {len(spec.source)}")
        with self._lock:
            known = self._compiled.get(spec)
            result: Future[Structure] = known or Future()
            self._compiled[spec] = result
            self._compiled.move_to_end(spec)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        if known is None:
            self._fulfil(spec, result)
        return result.result()

    def _fulfil(self, spec: StructureSpec, result: Future[Structure]) -> None:
        try:
            with self._backend_lock:
                backend = self._backend
            result.set_result(backend.compile(spec))
        except BaseException as error:  # noqa: BLE001 - it is raised in every thread that waits; none may wait for ever
            with self._lock:
                if self._compiled.get(spec) is result:
                    del self._compiled[spec]
            result.set_exception(error)

    @cached_property
    def _backend(self) -> GrammarCompiler:
        from kvgraft.engine.sampling.grammar_compiler import GrammarCompiler

        return GrammarCompiler(self._loaded, self._eos_token_ids)
