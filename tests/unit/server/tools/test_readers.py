"""Calls in what models write: each format, whole and in pieces, and what is no call."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.server.tools import TOOL_FORMATS, CallBegin, ForcedReader, FreeTextReader, ReadOutput
from kvgraft.server.tools.mistral import MistralFormat

NAMES = ("add", "get_weather")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "x"}}'
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}]'
NAMED = '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}'
JSON = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
ARGUMENTS = '{"a": 1, "b": "x"}'


def read(name, *chunks, **options):
    """Content, calls without ids, and the pieces of each chunk."""
    reader, output = FreeTextReader(TOOL_FORMATS[name], NAMES, **options), ReadOutput()
    steps = [reader.feed(chunk) for chunk in chunks] + [reader.finish()]
    for pieces in steps:
        output.add(pieces)
    return output.content, [(call.name, call.arguments) for call in output.calls], steps


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES),
        ("llama", LLAMA),
        ("llama", "<|python_tag|>" + LLAMA),
        ("mistral", MISTRAL),
        ("mistral", NAMED),
        ("json", JSON),
    ],
)
def test_text_in_front_of_a_call_is_content(name, text):
    assert read(name, f"I look it up.\n\n{text}")[:2] == ("I look it up.", [("add", ARGUMENTS)])
    assert read(name, text)[:2] == ("", [("add", ARGUMENTS)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"{HERMES}\n{HERMES}"),
        ("hermes", HERMES + HERMES),
        ("llama", f"{LLAMA}; {LLAMA}"),
        ("llama", f"<|python_tag|>{LLAMA};{LLAMA}"),
        ("mistral", f"[TOOL_CALLS] [{JSON}, {JSON}]"),
        ("mistral", NAMED + NAMED),
        ("json", f"{JSON}\n{JSON}"),
        ("json", f"[{JSON},\n{JSON}]"),
    ],
)
def test_several_calls(name, text):
    assert read(name, text)[:2] == ("", [("add", ARGUMENTS)] * 2)
    assert read(name, text, is_parallel=False)[:2] == ("", [("add", ARGUMENTS)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>call it</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}} and more</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "argu'),
        ("hermes", "5 < 6 <tool_cal"),
        ("llama", '{"name": "unknown", "parameters": {}}'),
        ("llama", '<|python_tag|>print("hello")'),
        ("llama", "a = {1, 2}; b = {"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"'),
        ("mistral", "[TOOL_CALLS]add and more"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{'a': 1}"),
        ("json", '{"name": "Ada", "age": 36}'),
        ("json", "[1, 2] and {}"),
        ("json", '[{"name": "add", "arguments": {}}, {"name": "unknown"'),
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(name, text):
    if name == "json" and "unknown" in text:  # the first item is a call by itself
        assert read(name, text)[:2] == ('[, {"name": "unknown"', [("add", "{}")])
    else:
        assert read(name, text)[:2] == (text, [])
        assert read(name, *text)[:2] == (text, [])


def test_a_call_behind_a_broken_one_is_found():
    broken = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>'
    assert read("hermes", f"{broken}\n{HERMES}")[:2] == (broken, [("add", ARGUMENTS)])


@pytest.mark.parametrize("size", [7, 10_000])
def test_an_output_of_many_broken_calls_is_text_from_some_place_on(size):
    text = '{"name": [' * 200 + JSON
    content, calls, _ = read("json", *(text[at : at + size] for at in range(0, len(text), size)))
    assert (content, calls) == (text, [])


def test_the_closing_tag_may_be_missing_at_the_end_only():
    assert read("hermes", HERMES.removesuffix("</tool_call>"))[:2] == ("", [("add", ARGUMENTS)])
    assert read("hermes", HERMES.removesuffix("call>"))[:2] == ("", [("add", ARGUMENTS)])


def test_marks_in_arguments_do_not_end_them():
    arguments = json.dumps({"a": '</tool_call>{"}[TOOL_CALLS]\\'})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", text)[:2] == read("hermes", *text)[:2] == ("", [("add", arguments)])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "add"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "add"}', '{"a": 1}'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}', '{"a": 1}'),
    ],
)
def test_forms_of_the_object(written, arguments):
    assert read("json", written)[:2] == ("", [("add", arguments)])


def test_newer_mistral_calls_may_have_ids():
    assert read("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{ARGUMENTS}")[:2] == ("", [("add", ARGUMENTS)])


def test_text_goes_out_at_once_and_what_may_be_a_call_does_not():
    _, _, steps = read(
        "hermes", "Let", " me", " see <", "b> <tool", "_call>", HERMES.removeprefix("<tool_call>"), " ok"
    )
    texts = ["".join(getattr(piece, "text", "") for piece in pieces) for pieces in steps]
    assert texts == ["Let", " me", " see", " <b>", "", ARGUMENTS, "ok", ""]
    assert isinstance(steps[5][0], CallBegin)
    assert steps[5][0].index == 0
    assert steps[5][0].call_id.startswith("call_")


def test_calls_in_another_layout_than_the_forced_one_stay_content():
    other = '{ "name": "add", "arguments": {}}'
    assert read("json", f"{other} {JSON}", is_laid_out=True)[:2] == (other, [("add", ARGUMENTS)])
    assert read("hermes", f"{HERMES}\n{HERMES}", is_laid_out=True)[:2] == ("", [("add", ARGUMENTS)] * 2)


def test_mistral_templates_get_ids_of_nine_characters():
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0123456789abcdef01234567"}]}
    told = MistralFormat().template_message(message)
    result = MistralFormat().template_message({"role": "tool", "tool_call_id": "call_0123456789abcdef01234567"})
    assert told["tool_calls"][0]["id"] == result["tool_call_id"] == "f01234567"


FRAGMENTS = st.sampled_from(
    [
        *(
            HERMES,
            LLAMA,
            MISTRAL,
            NAMED,
            JSON,
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
        ),
        *(
            "add",
            ";",
            " ",
            "\n",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            '{"name": "add", "arguments": ',
            "{}",
            "text",
            "<",
        ),
    ]
)


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    text=st.lists(FRAGMENTS, max_size=8).map("".join),
    cuts=st.sets(st.integers(1, 300), max_size=12),
    is_parallel=st.booleans(),
)
def test_the_same_is_read_however_the_text_is_cut(name, text, cuts, is_parallel):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    chunks = [text[start:end] for start, end in pairwise(bounds)]
    whole = read(name, text, is_parallel=is_parallel)[:2]
    assert read(name, *chunks, is_parallel=is_parallel)[:2] == whole
    assert read(name, *text, is_parallel=is_parallel)[:2] == whole


def forced(layout, arguments):
    calls = layout.separator.join(layout.before_arguments("add") + one + layout.after for one in arguments)
    return layout.opening + calls + layout.closing


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    values=st.lists(st.dictionaries(st.text(max_size=3), st.text() | st.lists(st.integers())), min_size=1, max_size=3),
    length=st.integers(1, 400),
)
def test_forced_calls_are_read_as_they_come_and_as_far_as_they_go(name, values, length):
    layout = TOOL_FORMATS[name].layout
    arguments = [json.dumps(value) for value in values]
    text = forced(layout, arguments)
    for end in (len(text), min(length, len(text))):
        whole, split = (ReadOutput() for _ in range(2))
        for output, chunks in ((whole, [text[:end]]), (split, text[:end])):
            reader = ForcedReader(layout, NAMES)
            for chunk in chunks:
                output.add(reader.feed(chunk))
            output.add(reader.finish())
        assert split.content == whole.content
        assert [call.arguments for call in split.calls] == [call.arguments for call in whole.calls]
        told = [call.arguments for call in whole.calls]
        assert told[:-1] == arguments[: len(told)][:-1]
        assert not told or arguments[len(told) - 1].startswith(told[-1])
    assert read(name, text)[:2] == ("", [("add", one) for one in arguments])


@given(name=st.sampled_from(sorted(TOOL_FORMATS)), text=st.lists(FRAGMENTS, max_size=8).map("".join))
def test_nothing_but_calls_and_white_space_around_them_is_lost(name, text):
    content, calls, _ = read(name, text)
    if not calls:
        assert content == text
    assert is_subsequence(content, text)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


def is_subsequence(part, text):
    letters = iter(text)
    return all(letter in letters for letter in part)
