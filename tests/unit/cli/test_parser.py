"""Help and mistakes on the command line: 80 columns, and what was meant."""

from __future__ import annotations

import argparse
import re

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
        for line in (parser.format_help() + parser.format_help_all() + parser.format_usage()).splitlines()
        if len(line) > COLUMNS
    ]
    assert not too_long


def printed(capsys, *argv):
    """What a command prints before it ends well."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags_of(text):
    """Flags that a help explains: those at the beginning of a line."""
    return {word for line in text.splitlines() if line.startswith("  -") for word in re.findall(r"--[\w-]+", line[:32])}


@pytest.mark.parametrize(
    "command", [words for words, parser in parsers(build_parser()) if len(list(parser.options())) > 18]
)
def test_a_long_help_comes_in_two_steps(command, capsys):
    few, every = (flags_of(printed(capsys, *command, flag)) for flag in ("--help", "--help-all"))
    assert {"--help", "--help-all"} < few < every
    assert 5 <= len(few) - 2 <= 13
    known = next(set(parser.options()) for words, parser in parsers(build_parser()) if words == command)
    assert every == {flag for flag in known if flag.startswith("--")}


def test_serve_shows_first_what_users_of_other_servers_look_for(capsys):
    few = flags_of(printed(capsys, "serve", "--help"))
    assert {"--model", "--host", "--port", "--api-key", "--dtype", "--max-model-len", "--served-model-name"} < few
    assert len(printed(capsys, "serve", "--help").splitlines()) < 70


def test_what_is_not_shown_first_is_taken_all_the_same():
    parser = build_parser()
    for words, inner in parsers(parser):
        inner.format_help()
        inner.format_usage()
        assert inner.format_help_all() == inner.format_help_all(), words
    assert parser.parsed(["serve", "--page-size", "16"]).setting_page_size == "16"


def test_a_short_help_is_whole_and_does_not_speak_of_another(capsys):
    text = printed(capsys, "ui", "--help")
    assert "--help-all" not in text
    assert printed(capsys, "ui", "--help-all") == text


def test_a_mistake_is_answered_with_a_short_usage(capsys):
    with pytest.raises(SystemExit):
        main(["config", "show", "--prt", "1"])
    assert len(capsys.readouterr().err.splitlines()) < 8


def test_the_top_lists_every_command_once_in_a_line_of_a_group(capsys):
    text = printed(capsys, "--help")
    commands = [words[0] for words, _ in parsers(build_parser()) if len(words) == 1]
    lists = text.partition("examples:")[0].splitlines()
    assert sorted(line.split()[0] for line in lists if re.match("  [a-z]", line)) == sorted(commands)
    for line in text.partition("examples:")[2].splitlines():
        if line.startswith("  kvgraft "):
            assert line.split()[1] in commands


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
