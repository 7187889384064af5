"""Help and mistakes on the command line: 80 columns, and what was meant."""

from __future__ import annotations

import argparse

import pytest

from kvgraft.cli import build_parser, main
from kvgraft.cli.parser import COLUMNS, wrapped


def parsers(parser, words=()):
    """Every command's parser, by what is typed for it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*words, name))


@pytest.mark.parametrize("columns", ["200", "80"])
def test_all_help_fits_in_80_columns_however_wide_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    too_long = [
        f"{' '.join(words)}: {line}"
        for words, parser in parsers(build_parser())
        for line in (parser.format_help() + parser.format_usage()).splitlines()
        if len(line) > COLUMNS
    ]
    assert not too_long


def test_no_help_is_coloured_where_it_is_no_terminal():
    assert all("\x1b" not in parser.format_help() for _, parser in parsers(build_parser()))


def test_nothing_named_prints_what_there_is(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("usage: kvgraft")
    assert err == ""


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["srve"], "serve"),
        (["genrate", "x"], "generate"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--kv-byte=1"], ""),  # an abbreviation that argparse takes
        (["serve", "--modell", "x"], "--model"),
        (["config", "shwo"], "show"),
        (["config", "show", "--prt", "1"], "--port"),
        (["generate", "--reuse", "grfat", "x"], "graft"),
        (["generate", "--min-pp", "0.1", "x"], "--min-p"),
        (["bench", "fidelty"], "fidelity"),
    ],
)
def test_a_mistake_names_what_was_meant(argv, meant, capsys):
    if not meant:
        assert build_parser().parsed(argv).setting_kv_bytes == "1"
        return
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.rstrip().endswith(f"did you mean {meant}?")


def test_a_word_that_resembles_nothing_gets_no_guess(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--xyzzy"])
    assert "did you mean" not in capsys.readouterr().err


def test_messages_are_broken_on_terminals_alone():
    message = "kvgraft: " + "word " * 60 + "/a/path/" + "long" * 30
    assert wrapped(message, is_terminal=False) == message
    lines = wrapped(message, is_terminal=True).splitlines()
    assert all(len(line) <= COLUMNS for line in lines[:-1])
    assert " ".join(line.strip() for line in lines).split() == message.split()
