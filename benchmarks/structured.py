"""Structured output: which library makes masks faster, whether answers are valid, and what it costs the streams.

    python -m benchmarks.structured masks [--model DIR]
    python -m benchmarks.structured answers [--requests 1000]
    python -m benchmarks.structured streams [--model DIR] [--rounds 5]

`masks`: llguidance, which the engine uses, and xgrammar, if it is installed, compile twenty schemas and some hard ones, and
follow the same texts token by token, on one thread. Answers may be wrong in a library that allows what a schema forbids, so
`refused` counts texts that it does not allow. `answers`: seeded requests over the twenty schemas, drawn at random, eight at a
time; all that are not cut by the token limit are validated with `jsonschema`, and what is cut is counted. `streams`: eight
streams with a structure and eight without decode as many tokens, in turns; CPU seconds of the process beside wall clock,
because a busy machine changes the latter. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import torch
from tests.support.schemas import SCHEMAS

from kvgraft.config import EngineConfig
from kvgraft.engine import FinishReason, SamplingParams, StructureSpec
from kvgraft.engine.core import Engine
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.sampling.grammars import Grammars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.engine import RequestOutput
    from kvgraft.engine.sampling.grammar_state import Matcher
    from kvgraft.engine.sampling.structure import Structure

STREAMS = 8
_LETTERS = "abcdefghij"
_MOST_DRAWS = 20


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


HARD = {
    "enum of 5000": {"enum": [f"item {number * 7919 % 100_003}" for number in range(5_000)]},
    "50 levels": _nested(50),
    "text of 2000": {"type": "string", "minLength": 1_000, "maxLength": 2_000},
    "counted pattern of 500": {"type": "string", "pattern": "^([a-j]{2,9} ){50,500}$"},
    "any JSON": {"type": "object"},
}


def _hard_text(name: str) -> str:
    """A valid text of a hard schema, because random ones are short or end never."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list(_LETTERS), 5)) for _ in range(400)]
    values: dict[str, object] = {
        "enum of 5000": f"item {4_321 * 7919 % 100_003}",
        "text of 2000": " ".join(words[:200]),
        "counted pattern of 500": "".join(f"{word} " for word in words[:100]),
        "any JSON": {word: [word, 17.5, None, dict.fromkeys(words[:5], word)] for word in words[:10]},
    }
    if name == "50 levels":
        return '{"a":' * 50 + "7" + "}" * 50
    return json.dumps(values[name])


class LLGuidance:
    """Through the engine's own limits and checks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_id: int) -> None:
        self._loaded = SimpleNamespace(name="model", tokenizer=tokenizer, vocab_size=vocab_size)
        self._eos_id = eos_id
        self._warm = Grammars(self._loaded, [eos_id])
        self._warm.compile(StructureSpec.json_schema({}))

    def compile(self, schema: dict[str, Any]) -> Matcher:
        """A matcher at the beginning; nothing is known of the schema."""
        return self._warm._backend.compile(StructureSpec.json_schema(schema))._first.matcher.deep_copy()

    def mask(self, matcher: Matcher) -> np.ndarray:
        """A bit per token."""
        return np.frombuffer(matcher.compute_bitmask(), np.uint8)

    def accept(self, matcher: Matcher, token: int) -> None:
        """Go on."""
        matcher.consume_token(token)


class XGrammar:
    """With its defaults but for one thread, no cache, and objects that may have further keys, as JSON schema has it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_id: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[eos_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, schema: dict[str, Any]) -> Matcher:
        """As `LLGuidance.compile`."""
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        return self._xgrammar.GrammarMatcher(compiled)

    def mask(self, matcher: Matcher) -> np.ndarray:
        """A bit per token."""
        self._bits.fill_(-1)  # it is left alone where all are allowed
        matcher.fill_next_token_bitmask(self._bits)
        return self._bits[0].numpy().view(np.uint8)

    def accept(self, matcher: Matcher, token: int) -> None:
        """Go on."""
        matcher.accept_token(token)


def masks(args: argparse.Namespace) -> dict[str, Any]:
    """Times of both libraries, milliseconds."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    eos_id = tokenizer.eos_token_id
    cases = [(name, schema, _drawn(tokenizer, schema, args.texts)) for name, schema in SCHEMAS.items()]
    cases += [(name, schema, [_hard_text(name)]) for name, schema in HARD.items()]
    found = {}
    for library in (LLGuidance, XGrammar):
        try:
            made = library(tokenizer, len(tokenizer), eos_id)
        except ImportError as error:
            print(f"{library.__name__} is left out: {error}", file=sys.stderr)
            continue
        rows = {name: _follow(made, tokenizer, schema, texts, eos_id) for name, schema, texts in cases}
        found[library.__name__.lower()] = {
            "twenty": _summary([rows[name] for name in SCHEMAS]),
            "hard": {name: _summary([rows[name]]) for name in HARD},
        }
    return {"tokens": len(tokenizer), "libraries": found}


def _follow(
    library: LLGuidance | XGrammar,
    tokenizer: PreTrainedTokenizerBase,
    schema: dict[str, Any],
    texts: Sequence[str],
    eos_id: int,
) -> dict[str, Any]:
    """Compile a schema, and follow texts of it: times in milliseconds, and texts that are not allowed."""
    started = time.perf_counter()
    first = library.compile(schema)
    row: dict[str, Any] = {"compile": 1e3 * (time.perf_counter() - started), "masks": [], "refused": 0}
    for number, text in enumerate(texts):
        matcher = library.compile(schema) if number else first
        for token in [*tokenizer.encode(text, add_special_tokens=False), eos_id]:
            started = time.perf_counter()
            bits = library.mask(matcher)
            row["masks"].append(1e3 * (time.perf_counter() - started))
            if not bits[token // 8] >> (token % 8) & 1:
                row["refused"] += 1
                break
            started = time.perf_counter()
            library.accept(matcher, token)
            row["masks"][-1] += 1e3 * (time.perf_counter() - started)
    return row


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    times = np.concatenate([row["masks"] for row in rows])
    return {
        "compile_ms_median": round(statistics.median(row["compile"] for row in rows), 3),
        "compile_ms_max": round(max(row["compile"] for row in rows), 3),
        "masks": len(times),
        "mask_ms_mean": round(float(times.mean()), 4),
        "mask_ms_p99": round(float(np.quantile(times, 0.99)), 4),
        "mask_ms_max": round(float(times.max()), 4),
        "refused": sum(row["refused"] for row in rows),
    }


def _drawn(tokenizer: PreTrainedTokenizerBase, schema: dict[str, Any], count: int) -> list[str]:
    """Valid texts of a schema: drawn at random from what is allowed, ends being likely, and written as `json.dumps` does."""
    loaded = SimpleNamespace(name="model", tokenizer=tokenizer, vocab_size=len(tokenizer))
    grammar = Grammars(loaded, [tokenizer.eos_token_id]).compile(StructureSpec.json_schema(schema, compact=True))
    texts: list[str] = []
    for seed in itertools.count():
        ids = list(_draws(grammar, len(tokenizer), tokenizer, seed))
        if ids[-1] == tokenizer.eos_token_id:
            texts.append(json.dumps(json.loads(tokenizer.decode(ids[:-1])), ensure_ascii=False))
        if len(texts) == count or seed == _MOST_DRAWS * count:
            return texts
    raise AssertionError


def _draws(grammar: Structure, vocab_size: int, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[int]:
    generator, state = torch.Generator().manual_seed(seed), grammar.start()
    closing = tokenizer.encode('}],"', add_special_tokens=False)
    for step in range(400):
        logits = torch.randn(vocab_size, generator=generator)
        logits[closing] += step / 20
        logits[tokenizer.eos_token_id] += 9
        token = int(state.mask(logits).argmax())
        yield token
        if token == tokenizer.eos_token_id:
            return
        state.accept(token)


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """How many of many answers are valid."""
    engine = Engine(args.model, EngineConfig(num_slots=32_768))
    names, outcomes = list(SCHEMAS), {"valid": 0, "cut": 0, "invalid": 0}
    tokens, started = 0, time.perf_counter()
    for start in range(0, args.requests, STREAMS):
        chosen = [names[number % len(names)] for number in range(start, min(start + STREAMS, args.requests))]
        sampling = [
            SamplingParams(
                max_new_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=start + number,
                structure=StructureSpec.json_schema(SCHEMAS[name]),
            )
            for number, name in enumerate(chosen)
        ]
        prompts = [f"Write JSON of the schema {json.dumps(SCHEMAS[name])[:300]}:\n" for name in chosen]
        for name, output in zip(chosen, _run(engine, prompts, sampling), strict=True):
            outcomes[_outcome(output, SCHEMAS[name])] += 1
            tokens += len(output.token_ids)
    return {"requests": args.requests, **outcomes, "tokens": tokens, "seconds": round(time.perf_counter() - started, 1)}


def _run(engine: Engine, prompts: Sequence[str], sampling: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Generate for all prompts together, each with its own parameters."""
    names = []
    for prompt, params in zip(prompts, sampling, strict=True):
        request = engine.builder.build(prompt, RequestOptions(params, "off"))
        engine.add(request)
        names.append(request.request_id)
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise SystemExit(str(event.error))
            if event.part is not None and event.part.output is not None:
                outputs[event.request_id] = event.part.output
    return [outputs[name] for name in names]


def _outcome(output: RequestOutput, schema: dict[str, Any]) -> str:
    if output.finish_reason is FinishReason.LENGTH:
        return "cut"
    try:
        jsonschema.validate(json.loads(output.text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{output.text!r}: {error}", file=sys.stderr)
        return "invalid"
    return "valid"


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of eight streams, with a structure and without; medians over rounds that take turns."""
    engine = Engine(args.model, EngineConfig(num_slots=32_768))
    letters = StructureSpec.json_schema({"type": "array", "items": SCHEMAS["person"], "minItems": 200}, compact=True)
    sides: dict[str, StructureSpec | None] = {"free": None, "structured": letters}
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name in sides if number % 2 == 0 else reversed(sides):
            found = _rate(engine, sides[name], args.tokens, number)
            if number:  # the first round warms up
                rates[name].append(found)
    medians = {
        name: {clock: round(statistics.median(rate[clock] for rate in rows), 2) for clock in ("wall", "cpu")}
        for name, rows in rates.items()
    }
    ratios = {clock: round(medians["structured"][clock] / medians["free"][clock], 4) for clock in ("wall", "cpu")}
    return {"model": args.model, "streams": STREAMS, "tokens_per_s": medians, "ratio": ratios, "rounds": rates}


def _rate(engine: Engine, structure: StructureSpec | None, tokens: int, seed: int) -> dict[str, float]:
    sampling = [
        SamplingParams(
            max_new_tokens=tokens,
            temperature=1.0,
            seed=100 * seed + number,
            structure=structure,
            ignore_eos=structure is None,
        )
        for number in range(STREAMS)
    ]
    prompts = [f"List people {number} of round {seed}: " for number in range(STREAMS)]
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = _run(engine, prompts, sampling)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    count = sum(len(output.token_ids) for output in outputs)
    if count != tokens * STREAMS:
        raise SystemExit(f"the streams gave {count} tokens instead of {tokens * STREAMS}")
    return {"wall": round(count / wall, 2), "cpu": round(count / cpu, 2)}


_PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "masks": masks,
    "answers": answers,
    "streams": streams,
}


def main() -> int:
    """Run one part and print what it found; 1 if an answer is not valid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=_PARTS)
    parser.add_argument(
        "--model", default="graft-tiny", help="name or directory; for masks a directory with a tokenizer"
    )
    parser.add_argument("--texts", type=int, default=5, help="texts per schema that masks are made for")
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="per stream and round")
    args = parser.parse_args()
    result = _PARTS[args.part](args)
    print(json.dumps(result))
    return int(bool(result.get("invalid")))


if __name__ == "__main__":
    sys.exit(main())
