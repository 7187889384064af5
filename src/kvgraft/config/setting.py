"""One setting: its default, its one-line help and what it accepts. The only place that parses and checks values."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from kvgraft.errors import ConfigError

_SIZE = re.compile(r"(\d{1,12})\s*(KiB|MiB|GiB|TiB)")
_SIZE_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LONGEST_QUOTE = 60


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting accepts and how it is told to users.

    Attributes:
        help: One line without a full stop, in plain words.
        group: Heading in `--help` and in the documentation.
        low: Lowest value.
        above: Values must lie above it.
        high: Highest value.
        choices: The words that are accepted; empty for any.
        pattern: Regular expression of the whole text, and how to say it.
        size: Bytes, which may be written as `4GiB`.
        secret: Never printed.
        may_be_empty: An empty text is a value.
        remedy: What to do instead of a value that is out of range.
    """

    help: str
    group: str
    low: float = -math.inf
    above: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: tuple[str, str] | None = None
    size: bool = False
    secret: bool = False
    may_be_empty: bool = False
    remedy: str = ""


def setting(default: Any, help_text: str, group: str, **limits: Any) -> Any:  # noqa: ANN401 - like dataclasses.field
    """Return a dataclass field that carries its `Rule`."""
    rule = Rule(help_text, group, **limits)
    return dataclasses.field(default=default, repr=not rule.secret, metadata={"rule": rule})


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """Return the rule that `setting` put into `field`."""
    rule = field.metadata["rule"]
    assert isinstance(rule, Rule)
    return rule


def parsed(field: dataclasses.Field[Any], value: object) -> object:
    """Return `value` in the type of the field; texts are parsed.

    Raises:
        ConfigError: It has another type or is out of range.
    """
    rule = rule_of(field)
    result = _PARSERS[type(field.default)](field.name, rule, value)
    if isinstance(result, int | float):
        _check_range(field.name, rule, result)
    elif isinstance(result, str):
        _check_text(field.name, rule, result)
    return result


def _parse_int(name: str, rule: Rule, value: object) -> int:
    if isinstance(value, str):
        size = _SIZE.fullmatch(value.strip()) if rule.size else None
        if size is not None:
            return int(size[1]) * _SIZE_UNITS[size[2]]
        if re.fullmatch(r"[+-]?\d{1,20}", value.strip()):
            return int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    sizes = " or a size such as 4GiB" if rule.size else ""
    raise ConfigError(f"{name} must be a whole number{sizes}, not {quoted(value)}")


def _parse_float(name: str, _rule: Rule, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be a number, not {quoted(value)}")
    return number


def _parse_text(name: str, rule: Rule, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {quoted(value)}")
    if not value and not rule.may_be_empty:
        raise ConfigError(f"{name} must not be empty; leave it out for the default")
    return value


def _parse_texts(name: str, rule: Rule, value: object) -> tuple[str, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} must be a text or a list of texts, not {_told(rule, value)}")
    stripped = tuple(text.strip() for text in texts)
    if not all(re.fullmatch(r"[!-~]+", text) for text in stripped):
        raise ConfigError(f"{name} must be printable ASCII without blanks and not empty; leave it out for none")
    return stripped


_PARSERS = {int: _parse_int, float: _parse_float, str: _parse_text, tuple: _parse_texts}


def _check_range(name: str, rule: Rule, value: float) -> None:
    remedy = f"; {rule.remedy}" if rule.remedy else ""
    if value < rule.low:
        raise ConfigError(f"{name} must be at least {rule.low}, not {value}{remedy}")
    if value <= rule.above:
        raise ConfigError(f"{name} must be above {rule.above}, not {value}{remedy}")
    if value > rule.high:
        raise ConfigError(f"{name} must be at most {rule.high}, not {value}{remedy}")


def _check_text(name: str, rule: Rule, value: str) -> None:
    if rule.choices and value not in rule.choices:
        raise ConfigError(f"unknown {name} {quoted(value)}; choose {', '.join(rule.choices)}")
    if rule.pattern is not None and not re.fullmatch(rule.pattern[0], value):
        raise ConfigError(f"unknown {name} {quoted(value)}; choose {rule.pattern[1]}")


def _told(rule: Rule, value: object) -> str:
    return "what was given" if rule.secret else quoted(value)


def quoted(value: object) -> str:
    """Show a value in a one-line message."""
    if value is None:
        return "nothing"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "..."
