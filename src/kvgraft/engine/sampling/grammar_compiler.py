"""Compile structures for a model's tokenizer with llguidance. Loaded with the first structure.

What a client may send is bounded: `MAX_CHARS` of text, `_MOST_RULES` of a grammar, and llguidance's counters (`_LIMITS`) for
the result. llguidance calls itself once for each reference of a chain, and a stack that is too small ends the process,
so it is only called on threads with a stack for the longest chain of `MAX_CHARS` several times over (`_deep_threads`).
"""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import TYPE_CHECKING, Any

from kvgraft.config import quoted
from kvgraft.engine.sampling.grammar_state import Grammar, Vocabulary
from kvgraft.engine.sampling.lark_parts import choice_grammar, parts_grammar
from kvgraft.engine.sampling.schema_rules import check_schema
from kvgraft.engine.sampling.structure import StructureKind, StructureSpec
from kvgraft.errors import ConfigError, StructureError, one_line

if TYPE_CHECKING:
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.sampling.structure import Structure

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 400_000,
    "max_lexer_states": 20_000,
    "max_items_in_row": 2_000,
    "step_max_items": 5_000,
}
"""Departures from llguidance's defaults. States take 1 to 2 KB and are counted per request, so that one can use 40 MB. Items
of a step grow with the ambiguity of a grammar; ten times fewer would do for the schemas of our tests."""
_MOST_RULES = 500
"""Rules and terminals of a grammar; compiling takes time that grows with the square of those that are ambiguous."""
_RULE = re.compile(r'^[^\S\n]*[?!]?\w[^\n:"/]*:', re.MULTILINE)
_STACK_BYTES = 256 * 2**20
"""Of a thread that calls llguidance; pages that are not used take no memory. 64 MiB held all chains that we made."""
_STACK_LOCK = Lock()
_WHITESPACE = " "
"""White space that may stand between the tokens of JSON, once in each place.

llguidance's own default has no bound, and a model that likes blanks would never end. Where there was room for a line break
and an indentation of 16 blanks, small models took all of it in nearly every place. Outlines' default is one blank, too.
"""
_EBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+[^\S\n]*::=", re.MULTILINE)
_PLACE = re.compile(r"^at 1\(8\): (failed to compile JSON schema: )?")
"""Place where llguidance found a mistake, if that is after the `start: ` that we have written."""
_LONGEST_REASON = 200


class GrammarCompiler:
    """llguidance for one tokenizer; made for the first structure, because it takes a quarter of a second."""

    def __init__(self, loaded: LoadedModel, eos_token_ids: list[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ImportError("structured output needs llguidance: pip install 'kvgraft[structured]'") from error
        tokenizer = getattr(loaded.tokenizer, "backend_tokenizer", None)
        if tokenizer is None:
            raise ConfigError(
                f"model {loaded.name} has no fast tokenizer (tokenizer.json), which structured output needs"
            )
        if not eos_token_ids:
            raise ConfigError(f"model {loaded.name} names no end-of-text token, without which no structure can end")
        self._matcher: Any = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
        vocab_size = max(loaded.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        serialized = json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}
        try:
            self._tokenizer = llguidance.LLTokenizer(
                json.dumps(serialized), n_vocab=vocab_size, eos_token=eos_token_ids
            )
        except Exception as error:
            raise ConfigError(
                f"structured output does not know the tokenizer of {loaded.name}: {_reason(str(error))}; it needs one "
                "of bytes (ByteLevel or ByteFallback)"
            ) from error
        added = tokenizer.get_added_tokens_decoder()
        self._special_tokens = {
            token.content: token_id for token_id, token in added.items() if self._tokenizer.is_special_token(token_id)
        }
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary = Vocabulary.of(
            [
                None if self._tokenizer.is_special_token(token_id) else self._tokenizer.decode_bytes([token_id])
                for token_id in range(vocab_size)
            ]
        )
        num_threads = min(4, os.cpu_count() or 1)
        self._compilers = _deep_threads(num_threads, "kvgraft-compile")
        self._executor = _deep_threads(num_threads, "kvgraft-structure")

    def compile(self, spec: StructureSpec) -> Structure:
        """Return what `spec` says, compiled on a thread of its own; raises `ConfigError` if it cannot be."""
        return self._compilers.submit(self._compiled, spec).result()

    def _compiled(self, spec: StructureSpec) -> Structure:
        """Compile on a deep thread; what the backend raises, a panic too, the request has asked for."""
        try:
            return self._grammar_of(spec)
        except (ConfigError, MemoryError):
            raise
        except BaseException as error:
            raise ConfigError(f"the {_NAMES[spec.kind]} cannot be used: {one_line(error)}; simplify it") from error

    def _grammar_of(self, spec: StructureSpec) -> Structure:
        matcher = self._matcher(self._tokenizer, self._grammar(spec), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ConfigError(f"the {_NAMES[spec.kind]} cannot be used: {_reason(matcher.get_error())}")
        try:
            return Grammar(matcher, self._vocabulary, self._executor)
        except StructureError as error:
            raise ConfigError(f"the {_NAMES[spec.kind]} cannot be used: no text fits it, or it is too large") from error

    def _grammar(self, spec: StructureSpec) -> str:
        """Return `spec` as llguidance takes it."""
        lark, regex = self._matcher.grammar_from_lark, self._matcher.grammar_from_regex
        match spec.kind:
            case StructureKind.JSON_OBJECT:
                return str(lark(f"start: {_json_rule({'type': 'object'}, compact=spec.compact)}"))
            case StructureKind.JSON_SCHEMA:
                return str(lark(f"start: {_json_rule(_read_json(spec), compact=spec.compact)}"))
            case StructureKind.REGEX:
                return str(regex(_encodable(spec.source)))
            case StructureKind.CHOICE:
                return str(lark(choice_grammar(_listed(spec))))
            case StructureKind.PARTS:
                return str(lark(parts_grammar(_listed(spec), self._known_specials, _json_rule)))
            case StructureKind.GRAMMAR:
                if _EBNF_RULE.search(spec.source):
                    raise ConfigError(
                        "a grammar is written in llguidance's variant of Lark ('start: ...'), "
                        "not in EBNF or GBNF ('root ::= ...')"
                    )
                num_rules = len(_RULE.findall(spec.source))
                if num_rules > _MOST_RULES:
                    raise ConfigError(f"a grammar has at most {_MOST_RULES} rules and terminals, not {num_rules}")
                return str(lark(_encodable(spec.source)))

    @property
    def _known_specials(self) -> dict[str, int]:
        """Special tokens that may stand in literal text: those that do not end it."""
        return {text: token for text, token in self._special_tokens.items() if token not in self._eos_token_ids}


def _deep_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads with `_STACK_BYTES` each. They start here, all of them, because the size is one setting of the process.

    Raises:
        ConfigError: The system has no room for them.
    """
    executor, barrier = ThreadPoolExecutor(num_threads, thread_name_prefix=name), Barrier(num_threads + 1)
    try:
        with _STACK_LOCK:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                for _ in range(num_threads):  # none is idle before all are there, so each gets a thread of its own
                    executor.submit(barrier.wait)
            finally:
                threading.stack_size(usual)
    except RuntimeError as error:
        barrier.abort()
        executor.shutdown(wait=False)
        raise ConfigError(
            f"structured output needs {num_threads} threads of {_STACK_BYTES >> 20} MiB of address space each, which the "
            "system refuses; raise its limit (ulimit -v)"
        ) from error
    barrier.wait()
    return executor


_NAMES = {
    StructureKind.JSON_OBJECT: "JSON object",
    StructureKind.JSON_SCHEMA: "JSON schema",
    StructureKind.REGEX: "regular expression",
    StructureKind.CHOICE: "choice",
    StructureKind.GRAMMAR: "grammar",
    StructureKind.PARTS: "structure",
}


def _json_rule(schema: object, *, compact: bool = False) -> str:
    """Return what stands for a JSON value of `schema` in a rule of a Lark grammar."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConfigError(f"a JSON schema is an object, not {quoted(schema)}")
    check_schema(schema)
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    return f"%json {_encodable(json.dumps(schema | {'x-guidance': options}, ensure_ascii=False))}"


def _read_json(spec: StructureSpec) -> object:
    try:
        return json.loads(spec.source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {_NAMES[spec.kind]} is not JSON: {error}") from error


def _listed(spec: StructureSpec) -> list[object]:
    value = _read_json(spec)
    if not isinstance(value, list):
        raise ConfigError(f"the source of a {_NAMES[spec.kind]} is a list, not {quoted(value)}")
    return value


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a structure is made of whole characters, not {quoted(text)}") from error
    return text


def _reason(message: str) -> str:
    """The library's reason in one line: the first one and, of a regular expression, what is wrong with it."""
    if "oneOf constraints are not supported" in message:
        return "oneOf with options that could both hold is not supported; use anyOf"
    lines = [line.strip() for line in _PLACE.sub("", message).splitlines() if line.strip()]
    text = " ".join([*lines[:1], *[line for line in lines[1:] if line.startswith("error:")][:1]]) or "unknown reason"
    if text.startswith("panic"):
        return "it is too large for llguidance; use a smaller one"
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
