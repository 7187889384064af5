"""Structures: what may follow what, in the tokens of a model; and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.schemas import SCHEMAS
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvgraft.engine.sampling import grammar_state, grammars
from kvgraft.engine.sampling.grammars import Grammars
from kvgraft.engine.sampling.logit_rules import LogitRules
from kvgraft.engine.sampling.sampling import Sampler
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.engine.sampling.schema_rules import check_schema
from kvgraft.engine.sampling.structure import MAX_CHARS, StructureKind, StructureSpec
from kvgraft.errors import ConfigError, RequestError, StructureError
from kvgraft.models import bundled_model_path

jsonschema = pytest.importorskip("jsonschema")

CALL = [{"text": "<call>"}, {"schema": {"type": "integer"}}, {"text": "</call>"}]
PADDING = 40
"""Rows of the model's head for which the tokenizer has no token."""


class Model:
    """A tokenizer, and the grammars for it."""

    def __init__(self, tokenizer, eos_ids):
        self.tokenizer = tokenizer
        self.eos_ids = set(eos_ids)
        self.vocab_size = len(tokenizer) + PADDING
        loaded = SimpleNamespace(name="tiny", tokenizer=tokenizer, vocab_size=self.vocab_size)
        self.grammars = Grammars(loaded, eos_ids)

    def start(self, spec):
        return self.grammars.compile(spec).start()

    def allowed(self, state):
        """Tokens that may follow."""
        return set(torch.isfinite(state.mask(torch.zeros(self.vocab_size))).nonzero().flatten().tolist())

    def after(self, spec, text):
        """The state behind a text; fails if the structure does not allow it."""
        state = self.start(spec)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            assert token in self.allowed(state), f"{self.tokenizer.decode([token])!r} is not allowed in {text!r}"
            state.accept(token)
        return state

    def takes(self, spec, text):
        """Whether a text may stand there, whole or not, and whether it may end there."""
        try:
            state = self.after(spec, text)
        except AssertionError:
            return None
        return bool(self.eos_ids & self.allowed(state))

    def draw(self, spec, seed, limit=400):
        """A text drawn at random, and whether it came to its end; short ones are likelier than they would be."""
        generator, state, ids = torch.Generator().manual_seed(seed), self.start(spec), []
        for step in range(limit):
            logits = torch.randn(self.vocab_size, generator=generator)
            logits[list(self.eos_ids)] += 4
            logits[self.tokenizer.encode('}],"', add_special_tokens=False)] += step / 20
            token = int(state.mask(logits).argmax())
            if token in self.eos_ids:
                return self.tokenizer.decode(ids), True
            ids.append(token)
            state.accept(token)
        return self.tokenizer.decode(ids), False


@pytest.fixture(scope="module")
def tiny():
    return Model(AutoTokenizer.from_pretrained(bundled_model_path()), [1])


@pytest.fixture(scope="module")
def sentencepiece():
    """Tokens of characters and of bytes, spaces written as in SentencePiece, `<tool>` a token and two ends of text."""
    letters = [
        "<unk>",
        "<s>",
        "</s>",
        "<tool>",
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *'abc{}":1,',
    ]
    tokenizer = Tokenizer(
        BPE({text: number for number, text in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<tool>", "<end>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Model(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), [2, 4])


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_at_random_is_of_the_schema(tiny, name):
    spec = StructureSpec.json_schema(SCHEMAS[name])
    validator = jsonschema.validators.validator_for(SCHEMAS[name], jsonschema.Draft202012Validator)(SCHEMAS[name])
    texts = [text for text, is_whole in (tiny.draw(spec, seed) for seed in range(6)) if is_whole]
    assert texts
    for text in texts:
        validator.validate(json.loads(text))


def test_twenty_schemas():
    assert len(SCHEMAS) == 20


def test_an_object_ends_where_it_is_whole_and_nothing_follows(tiny):
    spec = StructureSpec.json_object()
    assert tiny.takes(spec, '{"a"') is False
    assert tiny.allowed(tiny.after(spec, '{"a": [1, null]}')) == {1}
    assert tiny.takes(spec, "[") is None


def test_few_tokens_are_those_that_the_mask_leaves(tiny):
    state, kinds = tiny.start(StructureSpec.json_schema(SCHEMAS["person"])), set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        few, allowed = state.few(tiny.vocab_size), tiny.allowed(state)
        kinds.add(few is None)
        assert len(allowed) > tiny.vocab_size // 5 if few is None else few.tolist() == sorted(allowed)
        if few is not None:
            assert state.few(int(few[-1]) + 1).tolist() == few.tolist()
            assert len(few) == 1 or state.few(int(few[-1])).tolist() == few.tolist()[:-1]
            assert state.few(int(few[0])) is None
        token = int(state.mask(torch.randn(tiny.vocab_size, generator=generator)).argmax())
        if token in tiny.eos_ids:
            break
        state.accept(token)
    assert kinds == {False, True}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_what_is_drawn_from_few_tokens_may_follow(tiny, temperature, penalty):
    params = SamplingParams(temperature=temperature, frequency_penalty=penalty, seed=3)
    rules = LogitRules.of(params, np.array([5]), tiny.eos_ids, torch.device("cpu"))
    state = tiny.start(StructureSpec.json_schema(SCHEMAS["person"]))
    sampler, generator = Sampler(params, torch.device("cpu"), state, rules), torch.Generator().manual_seed(1)
    counts = torch.zeros(tiny.vocab_size)
    for _ in range(30):
        logits = torch.randn(tiny.vocab_size, generator=generator)
        masked = state.mask(logits) - penalty * counts
        token = sampler.sample(logits)
        assert masked[token] > -torch.inf
        assert temperature or token == int(masked.argmax())
        counts[token] += 1
        if token in tiny.eos_ids:
            break


def test_compact_json_has_no_whitespace(tiny):
    assert tiny.takes(StructureSpec.json_object(), '{"a": 1}') is True
    assert tiny.takes(StructureSpec.json_object(compact=True), '{"a":1}') is True
    assert tiny.takes(StructureSpec.json_object(compact=True), '{"a": 1}') is None


def test_whitespace_does_not_go_on_for_ever(tiny):
    assert tiny.takes(StructureSpec.json_object(), '{ "a": 1 }') is True
    assert [tiny.takes(StructureSpec.json_object(), "{" + line) for line in ("\n", "\r\n", "\t", "\n    ")] == [
        None
    ] * 4
    for most in ("{ ", '{"a" ', '{"a": '):
        assert tiny.takes(StructureSpec.json_object(), most) is False, repr(most)
        for more in " \t\n":
            assert tiny.takes(StructureSpec.json_object(), most + more) is None, repr(most + more)


@pytest.mark.parametrize("pattern", [r"[a-c]{3}-\d+", r"^(yes|no)$", r'"[^"\n]*"', r"(?i)ab+c?", r"a/b\\c"])
def test_what_is_drawn_at_random_matches_the_regular_expression(tiny, pattern):
    for seed in range(4):
        text, is_whole = tiny.draw(StructureSpec.regex(pattern), seed, limit=60)
        if is_whole:
            assert re.fullmatch(pattern, text)
    assert any(tiny.draw(StructureSpec.regex(pattern), seed, limit=60)[1] for seed in range(4))


def test_choices_that_begin_alike(tiny):
    spec = StructureSpec.choice(["no", "no way", 'a "quoted"\n', "été"])
    assert [tiny.takes(spec, text) for text in ("no", "no way", "no w", 'a "quoted"\n', "été", "yes")] == [
        True,
        True,
        False,
        True,
        True,
        None,
    ]


def test_a_grammar(tiny):
    spec = StructureSpec.grammar('start: item ("," item)*\nitem: /[0-9]+/ | "(" start ")"')
    assert tiny.takes(spec, "1,(22,(3)),4") is True
    assert tiny.takes(spec, "(1") is False
    assert tiny.takes(spec, "1,,") is None


class TestParts:
    def test_text_schema_and_separated_repetition(self, tiny):
        spec = StructureSpec.parts([{"repeat": CALL, "separator": "\n"}])
        assert tiny.allowed(tiny.after(spec, "<call>1</call>")) > {1}
        assert tiny.takes(spec, "<call>1</call>\n<call>-2</call>") is True
        assert tiny.takes(spec, "<call>1</call>\n") is False
        assert tiny.takes(spec, "<call>x") is None
        assert tiny.takes(spec, "hello") is None

    def test_one_of_several_and_optional(self, tiny):
        spec = StructureSpec.parts(
            [
                {"any_of": [[{"text": "f("}, {"schema": {"enum": [1, 2]}}], [{"text": "g("}]]},
                {"optional": [{"text": "!"}]},
            ]
        )
        assert [tiny.takes(spec, text) for text in ("f(1", "f(2!", "g(", "g(!", "f(3", "g(1")] == [
            True,
            True,
            True,
            True,
            None,
            None,
        ]

    def test_free_text_ends_where_a_call_begins(self, tiny):
        free = {"free": {"until": ["<call>"]}}
        spec = StructureSpec.parts([free, {"optional": [{"repeat": CALL, "separator": "\n"}]}])
        for text in ("", "hello <cal", "hello <call>1</call>", "<call>1</call>\n<call>2</call>"):
            assert tiny.takes(spec, text) is True
        assert tiny.takes(spec, "hello <call>") is False
        assert tiny.takes(spec, "hello <call>x") is None
        assert tiny.takes(spec, "<call>1</call> bye") is None

    def test_free_text_between_calls_of_two_kinds(self, tiny):
        free = {"free": {"until": ["<call>", "[X]"]}}
        calls = {"repeat": [free, {"any_of": [CALL, [{"text": "[X]y"}]]}]}
        spec = StructureSpec.parts([{"optional": [calls]}, free])
        for text in ("", "a [X]y b <call>1</call>[X]yq", "[X", "bye"):
            assert tiny.takes(spec, text) is True
        assert tiny.takes(spec, "a [X]z") is None
        assert tiny.takes(spec, "a <call>z") is None

    def test_the_text_of_a_special_token_is_that_token(self, sentencepiece):
        parts = [{"text": "<tool>a"}, {"schema": {"const": 1}}]
        assert sentencepiece.allowed(sentencepiece.start(StructureSpec.parts(parts))) == {3}
        assert sentencepiece.takes(StructureSpec.parts(parts), "<tool>a1") is True
        spec = StructureSpec.parts([{"free": {"until": ["<tool>"]}}, {"optional": parts}])
        assert [sentencepiece.takes(spec, text) for text in ("bc", "bc<tool>", "bc<tool>a1", "bc<tool>b")] == [
            True,
            False,
            True,
            None,
        ]

    @pytest.mark.parametrize(
        ("parts", "reason"),
        [
            ([{"bogus": 1}], "a part has one of the keys"),
            (["text"], "a part is an object"),
            ([{"text": 1}], "the text of a part is a text"),
            ([{"any_of": []}], "any_of is a list of lists"),
            ([{"optional": []}], "has one part at least"),
            ([{"free": {"until": [""]}}], "until is a list of texts"),
            ([{"free": {"until": ["a"]}}, {"schema": {}}], "after free text"),
            ([{"free": {"until": ["a"]}}, {"text": "b"}], "after free text"),
            ([{"repeat": [{"text": "a"}, {"free": {"until": ["a"]}}]}], "free text inside of other parts"),
        ],
    )
    def test_what_are_no_parts(self, tiny, parts, reason):
        with pytest.raises(ConfigError, match=reason):
            tiny.start(StructureSpec.parts(parts))


class TestTokens:
    def test_rows_without_a_token_and_special_tokens_are_never_drawn(self, tiny):
        anything = tiny.start(StructureSpec.regex(r"(?s:.*)"))
        assert tiny.allowed(anything) & {0, 2} == set()
        assert max(tiny.allowed(anything)) < len(tiny.tokenizer)

    def test_logits_wider_than_the_embedding(self, tiny):
        masked = tiny.start(StructureSpec.json_object()).mask(torch.zeros(tiny.vocab_size + 100))
        assert len(masked) == tiny.vocab_size + 100
        assert not torch.isfinite(masked[tiny.vocab_size :]).any()

    def test_parts_of_a_character(self, sentencepiece):
        spec = StructureSpec.choice(["é", "è"])
        state = sentencepiece.start(spec)
        assert sentencepiece.allowed(state) == {5 + 0xC3}
        state.accept(5 + 0xC3)
        assert sentencepiece.allowed(state) == {5 + 0xA9, 5 + 0xA8}

    def test_every_end_of_text_token_ends_it(self, sentencepiece):
        spec = StructureSpec.choice(["ab c\n"])
        assert sentencepiece.allowed(sentencepiece.after(spec, "ab c\n")) == {2, 4}

    def test_tokens_of_the_same_bytes_are_allowed_alike(self, sentencepiece):
        names = {letter: sentencepiece.tokenizer.convert_tokens_to_ids(letter) for letter in "a▁c"}
        state = sentencepiece.start(StructureSpec.choice(["a c"]))
        for letter, byte in zip("a▁c", b"a c", strict=True):
            assert sentencepiece.allowed(state) == {names[letter], 5 + byte}
            state.accept(5 + byte if letter == "a" else names[letter])
        assert sentencepiece.allowed(state) == {2, 4}

    def test_forks_go_their_own_ways(self, tiny):
        spec = StructureSpec.choice(["ab", "cd"])
        letters = {letter: tiny.tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"}
        state = tiny.start(spec)
        fork = state.fork()
        fork.accept(letters["c"])
        state.accept(letters["a"])
        deeper = state.fork()
        state.accept(letters["b"])
        assert tiny.allowed(fork) == {letters["d"]}
        assert tiny.allowed(state) == {1}
        assert tiny.allowed(deeper) == {letters["b"]}

    def test_a_token_that_breaks_the_structure_fails_its_request_alone(self, tiny):
        spec = StructureSpec.choice(["ab"])
        broken, other = tiny.start(spec), tiny.start(spec)
        broken.accept(tiny.tokenizer.convert_tokens_to_ids("z"))
        with pytest.raises(StructureError, match="cannot be followed further"):
            broken.mask(torch.zeros(tiny.vocab_size))
        assert tiny.allowed(other)

    def test_a_model_without_an_end_or_without_a_known_tokenizer_is_refused(self, tiny):
        with pytest.raises(ConfigError, match="names no end-of-text token"):
            Model(tiny.tokenizer, []).start(StructureSpec.json_object())
        unknown = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
        with pytest.raises(ConfigError, match="does not know the tokenizer of tiny"):
            Model(unknown, [0]).start(StructureSpec.json_object())
        with pytest.raises(ConfigError, match="no fast tokenizer"):
            Grammars(SimpleNamespace(name="x", tokenizer=None, vocab_size=9), [1]).compile(StructureSpec.json_object())


class TestCache:
    def test_equal_ones_are_compiled_once_by_many_threads(self, tiny):
        found, barrier = [], threading.Barrier(8)

        def compile_one():
            barrier.wait()
            found.append(tiny.grammars.compile(StructureSpec.regex("(once)+")))

        threads = [threading.Thread(target=compile_one) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(structure) for structure in found}) == 1

    def test_the_one_used_longest_ago_is_forgotten(self, tiny, monkeypatch):
        monkeypatch.setattr(grammars, "MAX_KEPT", 2)
        model = Model(tiny.tokenizer, [1])
        specs = [StructureSpec.choice([text]) for text in "abc"]
        first, second = (model.grammars.compile(spec) for spec in specs[:2])
        assert model.grammars.compile(specs[0]) is first
        model.grammars.compile(specs[2])
        assert model.grammars.compile(specs[0]) is first
        assert model.grammars.compile(specs[1]) is not second

    def test_what_failed_is_tried_again(self, tiny):
        for _ in range(2):
            with pytest.raises(ConfigError, match="unclosed group"):
                tiny.start(StructureSpec.regex("(a"))


PATTERNS = [{"type": "string", "pattern": f"a.*{n}.*"} for n in range(13)]
REFUSED_SCHEMAS = {
    "not an object": ([], "a JSON schema is an object"),
    "false": (False, "a JSON schema is an object"),
    "no text fits": ({"$ref": "#"}, "no text fits"),
    "unknown type": ({"type": "strin"}, "Invalid type: strin"),
    "unknown format": ({"type": "string", "format": "bogus"}, "Unknown format: bogus"),
    "lookaround": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "options that overlap": ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "use anyOf"),
    "kept by no draft": ({"properties": {"a": {"not": {}}}}, r"the schema\.properties\.a has not,"),
    "passed over by an old draft": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": {"unevaluatedItems": False, "dependentRequired": {}},
        },
        "dependentRequired",
    ),
    "of a later draft": ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}, "prefixItems"),
    "unique items": ({"anyOf": [{"type": "array", "uniqueItems": True}]}, "uniqueItems"),
    "options of the backend": ({"x-guidance": {"lenient": True}, "not": {}}, "structured output"),
    "an id within": ({"properties": {"a": {"$id": "b", "$ref": "#/$defs/c"}}}, "id of its own"),
    "keys that may come twice": ({"type": "object", "minProperties": 3}, "minProperties 3"),
    "rounded": ({"enum": [{"a": [2**53 + 1]}]}, "beyond 2"),
    "a large automaton": ({"items": {"multipleOf": 1.000003}}, "multipleOf"),
    "patterns that hold together": ({"items": {"allOf": PATTERNS}}, r"the schema\.items has more than 12 patterns"),
    "patterns of a chain of references": (
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): {"pattern": "a", "$ref": f"#/$defs/{n + 1}"} for n in range(13)} | {"13": {}},
        },
        "more than 12 patterns",
    ),
    "patterns of choices within choices": (
        {"pattern": "a", "anyOf": [{"format": "date", "oneOf": [{}, {"allOf": PATTERNS[:11]}]}]},
        "more than 12 patterns",
    ),
}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": PATTERNS},
        {"allOf": PATTERNS[:12]},
        {"allOf": [{"properties": {f"k{n}": one}} for n, one in enumerate(PATTERNS)]},
        {"$defs": {"a": {"pattern": "a", "$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_patterns_that_need_not_hold_together_may_be_many(schema):
    check_schema(schema)


@pytest.mark.parametrize("name", REFUSED_SCHEMAS)
def test_refused_schemas_name_what_is_wrong_in_one_line(tiny, name):
    schema, reason = REFUSED_SCHEMAS[name]
    with pytest.raises(ConfigError, match=reason) as caught:
        tiny.start(StructureSpec(StructureKind.JSON_SCHEMA, json.dumps(schema)))
    assert len(str(caught.value).splitlines()) == 1


REFUSED = {
    "regex": (StructureSpec.regex("(a"), "unclosed group"),
    "backreference": (StructureSpec.regex(r"(a)\1"), "backreferences"),
    "anchor within": (StructureSpec.regex("a$b"), "lookarounds not supported"),
    "half a character": (StructureSpec.regex("\ud800"), "whole characters"),
    "half a character in a choice": (StructureSpec.choice(["\ud800"]), "whole characters"),
    "no choice": (StructureSpec.choice([]), "one or more texts"),
    "no texts": (StructureSpec(StructureKind.CHOICE, "[1]"), "one or more texts"),
    "no list": (StructureSpec(StructureKind.CHOICE, "{}"), "is a list"),
    "no JSON": (StructureSpec(StructureKind.JSON_SCHEMA, "{"), "is not JSON"),
    "GBNF": (StructureSpec.grammar('root ::= "a"'), "not in EBNF or GBNF"),
    "unknown rule": (StructureSpec.grammar("start: a"), "unknown name"),
    "too long": (StructureSpec.regex("a" * (MAX_CHARS + 1)), "at most 131072 characters"),
    "deep grammar": (StructureSpec.grammar("start: " + "(" * 5_000 + '"a"' + ")" * 5_000), "too deeply nested"),
    "deep expression": (StructureSpec.regex("(" * 5_000 + "a" + ")" * 5_000), "cannot be used"),
    "exponential terminal": (
        StructureSpec.grammar("start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"'),
        "too big",
    ),
    "deep schema": (StructureSpec(StructureKind.JSON_SCHEMA, '{"items":' * 900 + "{}" + "}" * 900), "recursion limit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_structures_name_what_is_wrong_in_one_line(tiny, name):
    spec, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason) as caught:
        tiny.start(spec)
    assert len(str(caught.value).splitlines()) == 1


def test_a_backend_that_fails_in_any_way_refuses_the_structure(tiny, monkeypatch):
    def fail(_spec):
        raise SystemExit("panic\nat line 3")

    tiny.start(StructureSpec.choice(["b"]))
    monkeypatch.setattr(tiny.grammars._backend, "_grammar", fail)
    with pytest.raises(ConfigError, match=r"^the choice cannot be used: SystemExit: panic; simplify it$"):
        tiny.start(StructureSpec.choice(["a"]))


def test_a_structure_that_explodes_on_the_way_fails_its_request(tiny):
    def follow(state):
        for _ in range(200):
            state.accept(min(tiny.allowed(state)))

    with pytest.raises(StructureError, match="simplify it"):
        follow(tiny.start(StructureSpec.grammar('start: a{100000}\na: b{100000}\nb: "x"{100000}')))


def _references(number):
    names = [f"a{i}" for i in range(number + 1)]
    links = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**links, names[-1]: {"type": "string"}}})


def _rules(number, letter="a"):
    links = "".join(f"{letter}{i}: {letter}{i + 1}\n" for i in range(number))
    return f'start: {letter}0\n{links}{letter}{number}: "x"\n'


DEEP = {
    "references": StructureSpec(StructureKind.JSON_SCHEMA, _references(3_500)),
    "references in a grammar": StructureSpec.grammar(f"start: %json {_references(3_500)}"),
    "rules": StructureSpec.grammar(_rules(9_900)),
    "terminals": StructureSpec.grammar(_rules(9_900, "A")),
}
FOLLOW = """
import json, sys, threading
from transformers import AutoTokenizer
from types import SimpleNamespace
import torch
from kvgraft.engine.sampling.grammars import Grammars
from kvgraft.engine.sampling.structure import StructureKind, StructureSpec
from kvgraft.errors import ConfigError
from kvgraft.models import bundled_model_path
tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
grammars = Grammars(SimpleNamespace(name="tiny", tokenizer=tokenizer, vocab_size=len(tokenizer)), [1])
def follow(spec):
    try:
        state = grammars.compile(spec).start()
    except ConfigError as error:
        print("refused", str(error)[:60], flush=True)
        return
    for _ in range(3):
        token = int(state.mask(torch.zeros(len(tokenizer))).argmax())
        state.accept(token)
    print("followed", flush=True)
for kind, source in json.load(sys.stdin):
    thread = threading.Thread(target=follow, args=[StructureSpec(StructureKind(kind), source)])
    thread.start()
    thread.join()
"""


def test_chains_as_long_as_a_structure_may_be_do_not_end_the_process():
    assert all(len(spec.source) <= grammars.MAX_CHARS for spec in DEEP.values())
    sources = json.dumps([(spec.kind, spec.source) for spec in DEEP.values()])
    ran = subprocess.run([sys.executable, "-c", FOLLOW], input=sources, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-500:]
    lines = ran.stdout.splitlines()
    assert len(lines) == len(DEEP)
    assert lines[:2] == ["followed", "followed"]
    assert all(line.startswith("refused a grammar has at most 500 rules") for line in lines[2:])


def _ambiguous(number):
    rules = "".join(f'r{i}: s "{chr(97 + i % 26)}" | "a"\n' for i in range(number))
    return StructureSpec.grammar(f'start: s\ns: {" | ".join(f"r{i} s" for i in range(number))} | "x"\n{rules}')


def test_an_ambiguous_grammar_is_refused(tiny):
    with pytest.raises(ConfigError, match="too large"):
        tiny.start(_ambiguous(400))
    with pytest.raises(ConfigError, match="at most 500 rules"):
        tiny.start(_ambiguous(700))


def test_a_mask_that_does_not_come_fails_its_request_alone(tiny, monkeypatch):
    monkeypatch.setattr(grammar_state, "_LONGEST_MASK_S", 0.01)
    monkeypatch.setattr(grammar_state, "_LONGEST_WAIT_S", 0.05)
    state = grammar_state.GrammarState(grammar_state._Search(Future()), None, None)
    with pytest.raises(
        RequestError, match=r"not followed within 0\.05 s: the machine is overloaded; try again"
    ) as caught:
        state.mask(torch.zeros(tiny.vocab_size))
    assert not isinstance(caught.value, StructureError)
    assert tiny.allowed(tiny.start(StructureSpec.choice(["a"])))


def test_a_mask_that_computes_for_too_long_fails_its_request(monkeypatch):
    monkeypatch.setattr(grammar_state, "_LONGEST_MASK_S", 0.05)
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        search = grammar_state._Search.begun(executor, lambda: spin(is_over))
        with pytest.raises(StructureError, match=r"took it over 0\.05 s; simplify it"):
            search.result()
        is_over.set()


def spin(is_over):
    """Compute until it is over."""
    while not is_over.is_set():
        pass


def test_a_mask_that_waits_for_a_thread_or_a_processor_has_its_time(monkeypatch):
    """More than it may compute passes in front of its beginning, and in it while it does nothing."""
    monkeypatch.setattr(grammar_state, "_LONGEST_MASK_S", 0.05)
    is_free = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(is_free.wait, 60)
        search = grammar_state._Search.begun(executor, lambda: time.sleep(0.2) or "found")
        threading.Timer(0.2, is_free.set).start()
        assert search.result() == "found"


def test_clocks_of_systems_without_those_of_threads(monkeypatch):
    monkeypatch.delattr(time, "pthread_getcpuclockid", raising=False)
    monkeypatch.setattr(grammar_state, "_LONGEST_MASK_S", 0.05)
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        search = grammar_state._Search.begun(executor, lambda: is_over.wait(60))
        with pytest.raises(StructureError, match="simplify it"):
            search.result()
        is_over.set()


def test_the_stack_of_other_threads_stays(tiny):
    usual = threading.stack_size()
    Model(tiny.tokenizer, [1]).start(StructureSpec.choice(["a"]))
    assert threading.stack_size() == usual
