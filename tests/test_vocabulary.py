"""The code keeps to docs/glossary.md: one name for one thing, and the words of the field.

What does not yet is counted in vocabulary.json, which may only shrink. After a change for the better, write it anew with
`python -m tests.test_vocabulary` and commit it; what rises there needs a reason in review.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.source_tree import modules

COMMITTED = Path(__file__).parent / "vocabulary.json"
_REMEDY = "; if the code is better now, `python -m tests.test_vocabulary` writes the new figures"
_VAGUE = re.compile(r"\b(whoever|whatever|whichever|somebody|nobody|told|tells)\b", re.IGNORECASE)
# Of the column "not" of docs/glossary.md those words that mean nothing else in a class name of ours.
_OUTDATED = re.compile(r"(Searcher|Library|Registrar|StandIns?|Cold|Warm|Proposals?)(?![a-z])")
_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def vague_words(code: str) -> int:
    """Count vague words in docstrings, comments and messages; identifiers do not count."""
    if not _VAGUE.search(code):
        return 0
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(len(_VAGUE.findall(token.string)) for token in tokens if token.type in _PROSE)


def public_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the modules that define each public class, by name."""
    found = defaultdict(list)
    for module, code in sources.items():
        for node in ast.parse(code).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def sources_of_tests() -> dict[str, str]:
    """Return the code of our tests by dotted name."""
    root = COMMITTED.parent
    return {
        ".".join(("tests", *path.relative_to(root).with_suffix("").parts)): path.read_text()
        for path in root.rglob("*.py")
    }


def state_of(sources: dict[str, str], tests: dict[str, str]) -> dict[str, object]:
    """Return what does not keep to the glossary, as it is committed; of tests the words alone."""
    words: Counter[str] = Counter()
    for module, code in (sources | tests).items():
        words[".".join(module.split(".")[:2])] += vague_words(code)
    classes = public_classes(sources)
    return {
        "vague_words": {package: words[package] for package in sorted(words) if words[package]},
        "defined_twice": sorted(name for name, places in classes.items() if len(places) > 1),
        "outdated_names": sorted(name for name in classes if _OUTDATED.search(name)),
    }


@pytest.fixture(scope="module")
def sources():
    return {module: path.read_text() for module, path in modules().items()}


@pytest.fixture(scope="module")
def state(sources):
    return state_of(sources, sources_of_tests())


@pytest.fixture(scope="module")
def committed():
    return json.loads(COMMITTED.read_text())


def test_no_package_uses_more_vague_words(state, committed):
    limits, found = committed["vague_words"], state["vague_words"]
    risen = {package: f"{n} > {limits.get(package, 0)}" for package, n in found.items() if n > limits.get(package, 0)}
    assert not risen, "name the subject, and let reports report (docs/glossary.md)"


def test_a_public_class_name_means_one_class(sources, state, committed):
    new = set(state["defined_twice"]) - set(committed["defined_twice"])
    assert not new, {name: public_classes(sources)[name] for name in new}
    assert not set(committed["defined_twice"]) - set(state["defined_twice"]), f"no exceptions any more{_REMEDY}"


def test_public_classes_have_the_names_of_the_glossary(state, committed):
    found = set(state["outdated_names"])
    assert not found - set(committed["outdated_names"]), "docs/glossary.md has another word for it"
    assert not set(committed["outdated_names"]) - found, f"no exceptions any more{_REMEDY}"


def test_prose_is_counted_and_code_is_not():
    code = '"""Nobody knows whatever."""\ntold = 1  # tells: whoever told it\nprint(f"{x} told")\n'
    assert vague_words(code) == 6


def test_names_that_break_the_rules_are_found():
    sources = {"kvgraft.a.x": "class Span: ...\nclass ColdSpans: ...", "kvgraft.b": "class Span: ...\nclass _Span: ..."}
    assert state_of(sources, {}) == {"vague_words": {}, "defined_twice": ["Span"], "outdated_names": ["ColdSpans"]}


if __name__ == "__main__":
    found = state_of({module: path.read_text() for module, path in modules().items()}, sources_of_tests())
    COMMITTED.write_text(json.dumps(found, indent=2) + "\n")
