"""Settings of a table as a frozen dataclass, each field an option of its command."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

PACKS = "../shared/data/dev"
"""Folder of the request packs, beside the checkout."""
CLOCKS = ("wall", "cpu")
"""Time as it passes, and the process's own."""
_FORMS = {int: "N", float: "X", str: "NAME"}


def option(default: Any, about: str, *, least: int | None = None, choices: Sequence[str] = ()) -> Any:  # noqa: ANN401
    """Return a field of `TableSettings` with its line of help.

    Args:
        default: int, float or str; a tuple takes several values.
        about: The line of help.
        least: Lowest value of a number.
        choices: Values of a string; empty for any.
    """
    return field(default=default, metadata={"about": about, "least": least, "choices": tuple(choices)})


def clock_option() -> Any:  # noqa: ANN401 - a field of any type
    """Return the field that names the clock of the times."""
    about = "cpu: the process's own time, for a machine that does other work"
    return option(CLOCKS[0], about, choices=CLOCKS)


def minutes_option() -> Any:  # noqa: ANN401 - a field of any type
    """Return the field that ends a measurement early."""
    return option(0.0, "measure nothing further after so long; rows are of what the journal has (0: all)", least=0)


@dataclass(frozen=True)
class TableSettings:
    """Settings of one table, each an option of its command.

    Raises:
        ConfigError: A number is below its least value.
    """

    seed: int = option(0, "of what is drawn, and of the intervals")

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            least, value = each.metadata["least"], getattr(self, each.name)
            if least is not None and value < least:
                raise ConfigError(f"{_flag(each.name)} must be at least {least}, not {value}")

    @property
    def num_steps(self) -> int:
        """Calls of `advance` during the measurement, for the progress bar."""
        raise NotImplementedError

    @property
    def absent(self) -> tuple[str, ...]:
        """Rows that need a pack that is not on this machine."""
        return ()


@dataclass(frozen=True)
class RoundsSettings(TableSettings):
    """Settings of a table that times rounds of prompts of several lengths.

    Raises:
        ConfigError: A length leaves no document after `shift` new tokens.
    """

    lengths: tuple[int, ...] = option((1024, 4096), "prompt lengths")
    shift: int = option(200, "new tokens before a document", least=1)
    rounds: int = option(5, "rounds per length", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.shift + 64
        if min(self.lengths) < least:
            raise ConfigError(f"--lengths must be at least --shift + 64 = {least}")

    @property
    def num_steps(self) -> int:
        """Rounds of all lengths."""
        return len(self.lengths) * self.rounds


def add_options(parser: argparse.ArgumentParser, settings: type[TableSettings]) -> None:
    """Add an option per field."""
    types = get_type_hints(settings)
    for each in dataclasses.fields(settings):
        default: Any = each.default
        is_list = isinstance(default, tuple)
        type_of = get_args(types[each.name])[0] if is_list else types[each.name]
        if is_list:
            default = " ".join(map(str, default)) or "all"
        choices = each.metadata["choices"]
        parser.add_argument(
            _flag(each.name),
            type=type_of,
            nargs="+" if is_list else None,
            default=each.default,
            choices=choices or None,
            metavar=None if choices else _FORMS[type_of],
            help=f"{each.metadata['about']} (default {default})",
        )


def settings_of(args: argparse.Namespace, settings: type[TableSettings]) -> TableSettings:
    """Return the settings that a command line gives."""
    given: dict[str, Any] = {each.name: getattr(args, each.name) for each in dataclasses.fields(settings)}
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    return settings(**values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
