"""Names of parts of prompts: which tokens labels are about, and how many names are kept and told of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft.engine.requests import document_names
from kvgraft.engine.requests.document_names import DocumentLabel, document_reuse, labelled_tokens
from kvgraft.engine.requests.donor_names import DocumentNames
from kvgraft.types import CONTINUATION, Fidelity, NamedPart


@dataclass(frozen=True)
class Span:
    donor_id: int
    donor_start: int
    target_start: int
    length: int
    documents: tuple[NamedPart, ...] = ()
    fidelity: Fidelity = Fidelity.SHIFTED


class Donors(dict):
    """A catalogue that never changes."""

    def watch(self, _watcher):
        """Nothing to tell."""


def random_spans(rng):
    """Tokens of several characters, of none, and of a part of one character."""
    spans, end = [], 0
    for kind in rng.integers(0, 4, 60):
        if kind == 0:
            spans.append((end, end))
        elif kind == 1:
            spans += [(end, end + 1)] * 3
            end += 1
        else:
            spans.append((end, end := end + int(rng.integers(1, 5))))
    return spans, end


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_about_all_tokens_that_have_a_character_of_them(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    spans, length = random_spans(rng)
    monkeypatch.setattr(document_names, "token_spans", lambda *_args, **_options: spans)
    labels = [DocumentLabel("x", a, b) for a in range(length) for b in range(a + 1, min(a + 7, length) + 1)]
    found = labelled_tokens("c" * length, len(spans), labels, None, add_special_tokens=False)
    expected = []
    for label in labels:
        inside = [n for n, (a, b) in enumerate(spans) if a < b and a < label.stop and b > label.start]
        expected.append(NamedPart("x", inside[0], inside[-1] - inside[0] + 1))
    assert list(found) == expected


def test_labels_where_no_token_lies_name_nothing(monkeypatch):
    monkeypatch.setattr(document_names, "token_spans", lambda *_args, **_options: [(0, 0), (0, 2), (5, 6)])
    labels = [DocumentLabel("gap", 3, 4), DocumentLabel("all", 0, 6), DocumentLabel("end", 6, 7)]
    found = labelled_tokens("c" * 7, 3, labels, None, add_special_tokens=False)
    assert found == (NamedPart("all", 1, 2),)


def test_names_of_donors_and_of_reports_are_bounded():
    tokens = np.arange(2_000)
    donors = Donors({n: SimpleNamespace(start_position=0, num_tokens=2_000, token_ids=tokens) for n in range(8)})
    names = DocumentNames(donors)
    documents = tuple(NamedPart(f"d{n}", n, 900) for n in range(1_000))
    names.note(SimpleNamespace(documents=documents, token_ids=tokens), donors)
    spans = [Span(n, 0, 2_000 * n, 2_000) for n in donors]
    told = list(names.named(spans))
    assert [len(span.documents) for span in told] == [256] * 4 + [0] * 4
    assert [replace(span, documents=()) for span in told] == spans
    assert [part.document_id for part in told[0].documents] == [f"d{n}" for n in range(256)]
    assert told[1].documents[3] == NamedPart("d3", 2_003, 900)


def test_copied_tokens_of_a_document_are_those_of_all_spans():
    spans = (Span(0, 0, 10, 5), Span(0, 0, 20, 10), Span(0, 0, 50, 5))
    report = SimpleNamespace(exact_tokens=13, spans=spans)
    found = document_reuse([NamedPart("a", 12, 10), NamedPart("b", 30, 9), NamedPart("c", 0, 60)], report)
    assert [(each["exact_tokens"], each["copied_tokens"]) for each in found] == [(1, 5), (0, 0), (13, 20)]
    every = [NamedPart("x", start, stop - start) for start in range(60) for stop in range(start + 1, 61)]
    copied = {position for span in spans for position in range(span.target_start, span.target_start + span.length)}
    expected = [len(copied & set(range(part.start, part.stop))) for part in every]
    assert [each["copied_tokens"] for each in document_reuse(every, report)] == expected
    exact = Span(0, 0, 0, 4, fidelity=Fidelity.EXACT)  # counted among the exact ones already
    (alone,) = document_reuse([NamedPart("a", 0, 9)], SimpleNamespace(exact_tokens=4, spans=(exact,)))
    assert (alone["exact_tokens"], alone["copied_tokens"]) == (4, 0)


def test_continued_tokens_of_a_document_are_no_copied_ones():
    """Exact, continued from the engine and from a donor, exact again, computed, copied."""
    spans = (
        Span(CONTINUATION, 10, 10, 20, fidelity=Fidelity.CONTINUED),
        Span(3, 30, 30, 10, fidelity=Fidelity.CONTINUED),
        Span(4, 40, 40, 5, fidelity=Fidelity.EXACT),
        Span(5, 0, 50, 10),
    )
    report = SimpleNamespace(exact_tokens=15, spans=spans)
    names = ("exact_tokens", "continued_tokens", "copied_tokens")
    found = document_reuse([NamedPart("a", 0, 60), NamedPart("b", 5, 30), NamedPart("c", 38, 10)], report)
    assert [tuple(each[name] for name in names) for each in found] == [(15, 30, 10), (5, 25, 0), (5, 2, 0)]
