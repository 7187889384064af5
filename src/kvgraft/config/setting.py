"""One setting: its default, its one-line help and what it accepts. The only place that parses and checks values."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvgraft.errors import ConfigError
from kvgraft.factories import added_names

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(i?)B?|B)", re.IGNORECASE)
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_LARGEST = (1 << 63) - 1
"""Bound of whole numbers, which end up in 64-bit arrays."""
_LONGEST_QUOTE = 60


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting's rules and its text for users.

    Attributes:
        help: One line without a full stop, in plain words.
        group: Heading in `--help` and in the documentation.
        low: Lowest value.
        or_zero: 0 is a value as well, below `low`.
        above: Values must lie above it.
        high: Highest value.
        choices: The words that are accepted; empty for any.
        plugins: Entry-point group; its names, and those registered, are accepted besides `choices`; `module:Class`, too.
        pattern: Regular expression of the whole text, and how to say it.
        size: Bytes, which may be written as `4GiB`, `8GB` or `1.5GiB`.
        secret: Never printed.
        url: Printed without the passwords that may stand in it.
        may_be_empty: An empty text is a value.
        json_object: The text of a JSON object, or a mapping that is written as one; empty for an empty object.
        remedy: What to do instead of a value that is out of range.
    """

    help: str
    group: str
    low: float = -math.inf
    or_zero: bool = False
    above: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    plugins: str = ""
    pattern: tuple[str, str] | None = None
    size: bool = False
    secret: bool = False
    url: bool = False
    may_be_empty: bool = False
    json_object: bool = False
    remedy: str = ""


def setting(default: Any, help_text: str, group: str, **limits: Any) -> Any:  # noqa: ANN401 - like dataclasses.field
    """Return a dataclass field that carries its `Rule`."""
    rule = Rule(help_text, group, **limits)
    return dataclasses.field(default=default, repr=not (rule.secret or rule.url), metadata={"rule": rule})


def overridden(base: Any, name: str, default: Any = None, **changes: Any) -> Any:  # noqa: ANN401
    """Return the field `name` of `base` for a subclass, with another default (unless None) or other limits."""
    field = base.field(name)
    rule = dataclasses.replace(rule_of(field), **changes)
    return dataclasses.field(default=field.default if default is None else default, metadata={"rule": rule})


def without_password(urls: str) -> str:
    """Show one or more URLs, joined by commas, with `***` for what stands between `//` and the last `@` of each."""
    return re.sub(r"//[^,]*@", "//***@", urls)


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
    if isinstance(result, int | float) and not isinstance(result, bool):
        _check_range(field.name, rule, result)
    elif isinstance(result, str | tuple):
        for text in (result,) if isinstance(result, str) else result:
            _check_text(field.name, rule, text)
    return result


def _parse_int(name: str, rule: Rule, value: object) -> int:
    if isinstance(value, str):
        size = _SIZE.fullmatch(value.strip()) if rule.size else None
        if size is not None:
            return int(Fraction(size[1]) * _unit(size[2], size[3]))
        if re.fullmatch(r"[+-]?[0-9]{1,40}", value.strip()):
            return int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    sizes = " or a size such as 4GiB, 8GB or 1.5GiB" if rule.size else ""
    raise ConfigError(f"{name} must be a whole number{sizes}, not {quoted(value)}")


def _unit(letter: str | None, binary: str | None) -> int:
    """Bytes of a unit: `G` is 1000 cubed, `Gi` is 1024 cubed, with or without a `B` after it; no letter is a byte."""
    if letter is None:
        return 1
    size: int = (1024 if binary else 1000) ** ("KMGT".index(letter.upper()) + 1)
    return size


def _parse_bool(name: str, _rule: Rule, value: object) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    for truth, text in ((True, "true"), (False, "false")):
        if word is truth or word == text:
            return truth
    raise ConfigError(f"{name} must be true or false, not {quoted(value)}")


def _parse_float(name: str, _rule: Rule, value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be a number, not {quoted(value)}")
    return number


def _parse_text(name: str, rule: Rule, value: object) -> str:
    if rule.json_object:
        return _parse_object(name, value)
    if value is False and "off" in rule.choices:
        return "off"  # which YAML reads as false, unless it is quoted
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {quoted(value)}")
    if not value and not rule.may_be_empty:
        raise ConfigError(f"{name} must not be empty; leave it out for the default")
    if not is_text(value):
        raise ConfigError(f"{name} must be text without NUL and half characters, not {quoted(value)}; remove them")
    return value


def _parse_object(name: str, value: object) -> str:
    """Return the text of a JSON object, which files may give as a mapping."""
    if value == "":
        return ""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        found, text = None, ""
    if not isinstance(found, dict) or not is_text(text):
        raise ConfigError(f"""{name} must be a JSON object such as {{"name": 1}}, not {quoted(value)}""")
    return value if isinstance(value, str) else text


def _parse_texts(name: str, rule: Rule, value: object) -> tuple[str, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} must be a text or a list of texts, not {_told(rule, value)}")
    stripped = tuple(text.strip() for text in texts)
    if not all(re.fullmatch(r"[!-~]+", text) for text in stripped):
        raise ConfigError(f"{name} must be printable ASCII without blanks and not empty; leave it out for none")
    return stripped


_PARSERS = {bool: _parse_bool, int: _parse_int, float: _parse_float, str: _parse_text, tuple: _parse_texts}


def _check_range(name: str, rule: Rule, value: float) -> None:
    remedy = f"; {rule.remedy}" if rule.remedy else ""
    if value < rule.low and not (rule.or_zero and value == 0):
        zero = " or 0" if rule.or_zero else ""
        raise ConfigError(f"{name} must be at least {rule.low}{zero}, not {quoted(value)}{remedy}")
    if value <= rule.above:
        raise ConfigError(f"{name} must be above {rule.above}, not {quoted(value)}{remedy}")
    high = min(rule.high, _LARGEST) if isinstance(value, int) else rule.high
    if value > high:
        raise ConfigError(f"{name} must be at most {high}, not {quoted(value)}{remedy}")


def _check_text(name: str, rule: Rule, value: str) -> None:
    if rule.choices and value not in rule.choices and not _is_plugin(rule, value):
        closest = difflib.get_close_matches(value, rule.choices, n=1)
        hint = f"did you mean {closest[0]!r}? " if closest else ""
        others = ", the name of an installed one or module:Class" if rule.plugins else ""
        raise ConfigError(f"unknown {name} {quoted(value)}; {hint}choose {', '.join(rule.choices)}{others}")
    if rule.pattern is not None and not re.fullmatch(rule.pattern[0], value):
        raise ConfigError(f"unknown {name} {_told(rule, value)}; choose {rule.pattern[1]}")


def _is_plugin(rule: Rule, value: str) -> bool:
    """Whether a value names what another package brings; that it can be loaded is found out where it is."""
    if not rule.plugins:
        return False
    return _CLASS.fullmatch(value) is not None or value in added_names(rule.plugins)


def _told(rule: Rule, value: object) -> str:
    if rule.url and isinstance(value, str):
        value = without_password(value)
    return "what was given" if rule.secret else quoted(value)


def is_text(value: str) -> bool:
    """Whether a text is UTF-8 without NUL: files, sockets and tokenizers take no other."""
    return _NO_TEXT.search(value) is None


def quoted(value: object) -> str:
    """Show a value in a one-line message."""
    if value is None:
        return "nothing"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        return "a huge number"
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "..."
