"""Command lines: help in two steps that fits in 80 columns, and mistakes that name what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

COLUMNS = 80
"""However wide a terminal is: longer lines are hard to read, and terminals that share their window are no wider."""
_INVALID_CHOICE = re.compile(r"invalid choice: '?(?P<given>[^' ]+)'?")


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, no wider than `COLUMNS`."""

    def __init__(self, prog: str, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        options["width"] = min(COLUMNS, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, **options)


class RawDescriptionHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The same, with descriptions as they are written."""


class Parser(argparse.ArgumentParser):
    """argparse's, with errors that name what was meant. Commands beneath get parsers of the same class.

    `--help` shows the flags that `show_first` named, `--help-all` all; where none were named, both show all.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **options)
        self._first: frozenset[str] = frozenset()
        self._help_all = self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)

    def show_first(self, flags: Sequence[str]) -> None:
        """See the function of this name."""
        unknown = set(flags) - set(self.options())
        assert not unknown, unknown
        self._first = frozenset({"--help", "--help-all", *flags})
        self._help_all.help = "show all options"

    def format_usage(self) -> str:
        """Return the usage with the same flags."""
        with self._hidden():
            return super().format_usage()

    def format_help(self) -> str:
        """Return what `--help` prints."""
        with self._hidden():
            return super().format_help()

    def format_help_all(self) -> str:
        """Return what `--help-all` prints."""
        return super().format_help()

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Keep flags that `show_first` did not name out of what argparse formats within."""
        rest = [each for each in self._actions if each.option_strings and self._first.isdisjoint(each.option_strings)]
        helps = [action.help for action in rest]
        try:
            for action in rest if self._first else ():
                action.help = argparse.SUPPRESS
            yield
        finally:
            for action, words in zip(rest, helps, strict=True):
                action.help = words

    def parsed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; report unknown arguments with the closest options of the command that was meant."""
        found, extras = self.parse_known_args(argv)
        if extras:
            meant = self._of_command(argv)
            meant.error(f"unrecognized arguments: {' '.join(extras)}{hint(extras, meant.options())}")
        return found

    def error(self, message: str) -> NoReturn:
        """Print usage and what is wrong, and exit with 2."""
        invalid = _INVALID_CHOICE.search(message)
        if invalid is not None:
            message += hint([invalid["given"]], self._choices())
        self.print_usage(sys.stderr)
        self.exit(2, wrapped(f"{self.prog}: error: {message}", sys.stderr.isatty()) + "\n")

    def options(self) -> Iterator[str]:
        """Yield all flags."""
        for action in self._actions:
            yield from action.option_strings

    def _choices(self) -> Iterator[str]:
        for action in self._actions:
            yield from map(str, action.choices or ())

    def _of_command(self, argv: Sequence[str]) -> Parser:
        """Return the parser of the innermost command that was named."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for number, word in enumerate(argv):
                    if word in action.choices:
                        inner = action.choices[word]
                        return inner._of_command(argv[number + 1 :]) if isinstance(inner, Parser) else self
        return self


class _HelpAll(argparse.Action):
    """Prints all flags and ends the command."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=options["help"])

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


def show_first(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Have `--help` of a command show these flags alone, beside `--help` itself and arguments without a flag."""
    assert isinstance(parser, Parser)
    parser.show_first(flags)


def hint(given: Iterable[str], known: Iterable[str]) -> str:
    """Say `; did you mean ...?` of the first word that resembles a known one; empty if none does."""
    known = list(known)
    for word in given:
        closest = difflib.get_close_matches(word.partition("=")[0], known, n=1)
        if closest:
            return f"; did you mean {closest[0]}?"
    return ""


def wrapped(message: str, is_terminal: bool) -> str:
    """Break a message into lines of a terminal; elsewhere it stays one line, for logs and `grep`."""
    if not is_terminal:
        return message
    return textwrap.fill(message, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
