"""The `kvgraft` command. Each subcommand lives in a module of its own with `register(subparsers)` and `run(args)`.

Exit codes: 0 done, 1 a check did not pass, 2 bad input (one line on stderr names the remedy), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from kvgraft import __version__
from kvgraft.cli import (
    bench_fidelity,
    bench_pack,
    bench_reuse,
    bench_serve,
    bench_ttft,
    calibrate,
    config,
    demo,
    doctor,
    explain,
    generate,
    heal,
    router,
    serve,
    store,
    ui,
)
from kvgraft.cli.parser import Parser, RawDescriptionHelpFormatter, wrapped
from kvgraft.config import is_text, quoted
from kvgraft.errors import OUT_OF_MEMORY, ConfigError, KVGraftError, is_out_of_memory, one_line
from kvgraft.interrupts import INTERRUPTED
from kvgraft.models import HUB_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_GROUPS = {
    "to try it": ("demo", "generate"),
    "to serve": ("serve", "ui", "config", "doctor"),
    "several engines": ("router", "heal", "store"),
    "to understand and measure": ("explain", "bench", "calibrate"),
}
"""All commands, as `--help` lists them."""
_EXAMPLES = """\
examples:
  kvgraft generate "first prompt" "second prompt"
  kvgraft doctor --model DIR
  kvgraft serve --model DIR --ui
  kvgraft explain --file answers.json --request-id r2 --html page.html
  kvgraft bench reuse builtin:rag agent:clock
  kvgraft bench fidelity builtin --model DIR
  kvgraft bench serve builtin:rag --rates 2,4,8 --plot load.png
  kvgraft calibrate --model DIR --prompts builtin --epsilon 0.02
  kvgraft router --worker URL,events=tcp://HOST:PORT
  kvgraft store ls DIR
  kvgraft config show --changed

'kvgraft COMMAND --help' shows the options that most people need, and
'kvgraft COMMAND --help-all' all of them.
"""


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="kvgraft",
        usage="kvgraft [-h] [--version] COMMAND ...",
        description="Reuse the KV cache of text a model has already read, wherever it\nappears in a prompt.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvgraft {__version__}")
    base: argparse.ArgumentParser = parser
    commands = base.add_subparsers(prog="kvgraft", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.set_defaults(run=lambda _: _bare(parser))
    demo.register(commands)
    generate.register(commands)
    serve.register(commands)
    router.register(commands)
    heal.register(commands)
    config.register(commands)
    doctor.register(commands)
    calibrate.register(commands)
    explain.register(commands)
    ui.register(commands)
    store.register(commands)
    bench = commands.add_parser("bench", help="measure reuse or speed", description="Measure reuse or speed.")
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    bench_pack.register(benchmarks)
    bench_reuse.register(benchmarks)
    bench_fidelity.register(benchmarks)
    bench_ttft.register(benchmarks)
    bench_serve.register(benchmarks)
    parser.epilog = f"{_command_list(commands)}\n{_EXAMPLES}"
    return parser


def _command_list(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> str:
    """Return every command with its line, under the headings of `_GROUPS`."""
    lines = {action.dest: action.help for action in commands._get_subactions()}
    width = max(map(len, lines)) + 2
    return "".join(
        f"{heading}:\n" + "".join(f"  {name:<{width}}{lines[name]}\n" for name in names) + "\n"
        for heading, names in _GROUPS.items()
    )[:-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    return run_command(build_parser, sys.argv[1:] if argv is None else argv)


def run_command(parser: Callable[[], Parser], argv: Sequence[str]) -> int:
    """Parse and run a command of a parser; return its exit code, with one line on stderr for bad input."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Of each file, and a model has many.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", f"{HUB_DEADLINE_S:.0f}")
    try:
        _check_text(argv)
        args = parser().parsed(argv)
        code: int = args.run(args)
        _flush()
    except KVGraftError as error:
        return _refused(str(error))
    except ImportError as error:
        return _refused(error.msg)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _refused(OUT_OF_MEMORY)
    except OSError as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("kvgraft: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _bare(parser: Parser) -> int:
    """Print the help, as no command was named; 2 as for other commands that cannot be run, for scripts."""
    parser.print_help()
    return 2


def _refused(message: str) -> int:
    print(wrapped(f"kvgraft: {message}", sys.stderr.isatty()), file=sys.stderr)
    return 2


def _failed(error: OSError) -> int:
    """Say what the operating system refused, and where; what of the output cannot be written is dropped.

    A reader that has seen enough, as `head` has, is no failure.
    """
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return 0
    try:
        _flush()
    except OSError:
        _drop_output()
    place = "" if error.filename is None else f"{error.filename}: "
    return _refused(f"{place}{error.strerror or one_line(error)}; give a place that can be used, or make room there")


def _flush() -> None:
    """Write what of the output is still held back, here where an error can be reported."""
    if sys.stdout is not None:  # as it is where the shell closed it
        sys.stdout.flush()


def _drop_output() -> None:
    """Have the interpreter's end write what is held back to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_text(argv: Sequence[str]) -> None:
    """Refuse arguments that are no text; prompts, names and paths alike, each of which would fail elsewhere.

    Raises:
        ConfigError: Bytes on the command line are not UTF-8, or an argument has a NUL.
    """
    for argument in argv:
        if "\0" in argument:
            raise ConfigError(f"the argument {quoted(argument)} contains NUL, which no name or path can; remove it")
        if not is_text(argument):
            raise ConfigError(
                f"the argument {quoted(argument)} is not UTF-8 text; check the encoding of the terminal, or rename the file"
            )
