"""Options of commands that load a model: flags made from settings, and their way into a `ServerConfig`."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any

from kvgraft.cli.preflight import check_start
from kvgraft.cli.stages import shown_stages
from kvgraft.config import ServerConfig, default_text, grouped_settings, resolve
from kvgraft.config.setting import rule_of
from kvgraft.observability.stages import stage

if TYPE_CHECKING:
    import dataclasses
    from collections.abc import Collection

    from kvgraft.config import Resolved
    from kvgraft.config.setting import Rule
    from kvgraft.engine import LLM
    from kvgraft.observability import Recorder

_MODEL_SETTINGS = ("model", "dtype", "device", "num_slots", "max_model_len", "selection", "recompute_ratio")
_LONGEST_FORM = 32
"""Characters of choices that stand beside an option in `--help`."""
_FORMS = {bool: "true|false", int: "N", float: "X", str: "TEXT", tuple: "KEY,KEY"}


def add_model_options(parser: argparse.ArgumentParser, *further: str) -> None:
    """Add the settings that a command with a model needs on its command line, and `further`; others come from elsewhere."""
    add_settings(parser, (*_MODEL_SETTINGS, *further))


def add_settings(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add `--config` and a flag per setting, all of them or those of `names`, under their headings."""
    for heading, fields in grouped_settings().items():
        chosen = [field for field in fields if names is None or field.name in names]
        group = parser.add_argument_group(heading) if chosen else parser
        for field in chosen:
            rule = rule_of(field)
            default = "" if field.default in ("", ()) else f" (default {default_text(field)})"
            action = group.add_argument(
                "--" + field.name.replace("_", "-"),
                metavar=_form(field),
                help=(_help(rule) + default).replace("%", "%%"),
                default=argparse.SUPPRESS,
                dest=f"setting_{field.name}",
            )
            if isinstance(field.default, bool):
                action.nargs, action.const = "?", "true"
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file of settings (flags and KVGRAFT_* variables override it)"
    )


def _form(field: dataclasses.Field[Any]) -> str:
    """Return the form of a value, in a column or two."""
    rule = rule_of(field)
    words = "|".join(rule.choices)
    if words and not rule.plugins and len(words) <= _LONGEST_FORM:
        return words
    return "NAME" if words else "SIZE" if rule.size else _FORMS[type(field.default)]


def _help(rule: Rule) -> str:
    """Return the help of a setting, with its choices where they have no room beside its name."""
    words = "|".join(rule.choices)
    is_short = not words or (not rule.plugins and len(words) <= _LONGEST_FORM)
    return rule.help if is_short else f"{rule.help}: {', '.join(rule.choices)}"


def resolve_settings(args: argparse.Namespace) -> Resolved[ServerConfig]:
    """Merge flags, environment, file and defaults, in this precedence."""
    given = vars(args)
    flags = {name: given[f"setting_{name}"] for name in ServerConfig.rules() if f"setting_{name}" in given}
    return resolve(ServerConfig, flags, args.config)


def engine_config(args: argparse.Namespace) -> ServerConfig:
    """Return the effective settings of a command."""
    return resolve_settings(args).config


def load_llm(config: ServerConfig, *, shows_stages: bool = True, recorder: Recorder | None = None) -> LLM:
    """Check the settings as far as that needs no torch, and load the model as `load_checked` does."""
    check_start(config)
    return load_checked(config, shows_stages=shows_stages, recorder=recorder)


def load_checked(config: ServerConfig, *, shows_stages: bool = True, recorder: Recorder | None = None) -> LLM:
    """Load the model that the settings name, quietly but for the stages of it on stderr.

    Args:
        config: The settings, which `check_start` has seen.
        shows_stages: False shows none: for output that programs read.
        recorder: Receives every step and every request that ends.
    """
    with shown_stages(shows_stages):
        stage("importing torch")
        from kvgraft.engine import LLM

        silence_libraries()
        logging.getLogger("kvgraft").setLevel(logging.ERROR)
        return LLM(config.model, config, recorder)


def silence_libraries() -> None:
    """Keep progress bars and warnings of libraries out of what commands print."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
