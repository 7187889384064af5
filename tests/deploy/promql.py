"""Reads of PromQL what a test can hold against an exposition: metrics, their labels, and functions around them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<range>\[[^\]]*\])"""
    r"""|(?P<number>\d[\w.]*)|(?P<name>[A-Za-z_:][\w:]*)|(?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])"""
)
_GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OVER_TIME = {"rate", "increase"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}


@dataclass(frozen=True)
class Selector:
    """A metric in a query.

    Attributes:
        metric: As it stands there.
        matchers: Label, sign and value.
        function: The innermost call that it stands in, "" for none.
        has_range: It is asked for over a time.
    """

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    function: str
    has_range: bool


@dataclass(frozen=True)
class Query:
    """A query: its selectors, and labels that results are grouped or joined by."""

    selectors: tuple[Selector, ...]
    groupings: frozenset[str]


def tokens(text):
    """Kinds and texts; raises ValueError where PromQL has no such sign."""
    place, found = 0, []
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"cannot read {text[place:]!r}")
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[0]))
        place = match.end()
    return found


def read(text):
    """Read a query; raises ValueError for what is not closed."""
    reader = _Reader([*tokens(text), ("end", "")])
    while reader.parts[reader.place][0] != "end":
        reader.step()
    if reader.calls:
        raise ValueError("a bracket is not closed")
    return Query(tuple(reader.selectors), frozenset(reader.groupings))


class _Reader:
    """Goes through a query from the left; `calls` are the brackets around the present place, by function."""

    def __init__(self, parts):
        self.parts, self.place = parts, 0
        self.selectors, self.groupings, self.calls = [], set(), []

    def step(self):
        kind, word = self.parts[self.place]
        following = self.parts[self.place + 1][1]
        self.place += 1
        if kind == "name" and word in _GROUPINGS:
            self._labels()
        elif kind == "name" and word not in _WORDS:
            self._name(word, following)
        elif word == "(":
            self.calls.append("")
        elif word == ")":
            if not self.calls:
                raise ValueError("a bracket too many")
            self.calls.pop()

    def _name(self, word, following):
        """A function, an aggregation (its labels may stand in front of its bracket), or a metric."""
        if following in _GROUPINGS:
            self.place += 1
            self._labels()
            following = self.parts[self.place][1]
        if following == "(":
            self.calls.append(word)
            self.place += 1
            return
        matchers, self.place = _matchers(self.parts, self.place)
        has_range = self.parts[self.place][0] == "range"
        function = next(filter(None, reversed(self.calls)), "")
        self.selectors.append(Selector(word, matchers, function, has_range))

    def _labels(self):
        if self.parts[self.place] != ("sign", "("):
            return
        end = self.parts.index(("sign", ")"), self.place)
        self.groupings |= {name for sort, name in self.parts[self.place : end] if sort == "name"}
        self.place = end + 1


def _matchers(parts, i):
    if parts[i] != ("sign", "{"):
        return (), i
    end = parts.index(("sign", "}"), i)
    inner = [part for part in parts[i + 1 : end] if part != ("sign", ",")]
    if len(inner) % 3:
        raise ValueError("labels without a value")
    triples = zip(inner[::3], inner[1::3], inner[2::3], strict=True)
    return tuple((label[1], sign[1], value[1][1:-1]) for label, sign, value in triples), end + 1


def base_name(metric):
    """The family of a series: of a histogram without its suffix."""
    return re.sub(r"_(bucket|sum|count)$", "", metric)


def problems(text, exposed):
    """What a query asks for that an `Exposed` (conftest.py) does not have, and counters that are taken as they are."""
    query = read(text)
    found = [] if query.selectors else ["asks for nothing"]
    for selector in query.selectors:
        family = exposed.family(selector.metric)
        if family is None:
            found.append(f"no metric {selector.metric}")
            continue
        kind, _, labels = family
        asked = {label for label, _, _ in selector.matchers} | query.groupings
        found += [f"{selector.metric} has no label {label}" for label in sorted(asked - labels - {"le"})]
        if "le" in query.groupings and "le" not in labels:
            found.append(f"{selector.metric} has no buckets")
        if (kind != "gauge") != (selector.function in _OVER_TIME and selector.has_range):
            found.append(f"{selector.metric} is a {kind}, in {selector.function or 'nothing'}")
    return found
