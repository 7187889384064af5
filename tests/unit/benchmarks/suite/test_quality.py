"""Table T6 on the bundled model: every method is asked alike, and what must be equal is."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from benchmarks.suite import quality, tables
from benchmarks.suite.methods import ALL_SUITES, EXACT, OFF, SUBSTITUTED, VERIFIED
from benchmarks.suite.quality import QualitySettings
from tests.support.notes import write_pairs_of_notes

from kvgraft.bench.journal import Journal
from kvgraft.engine import LLM, SamplingParams

SETTINGS = QualitySettings(
    suites=("adversarial",), policies=("none", "default"), limit=2, noise_floor=1, max_prompt_tokens=900
)


@pytest.fixture(scope="module")
def llm():
    return LLM("graft-tiny", num_slots=4_000)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of notes that differ in the answer to one question; copies are other pairs of another beginning."""
    folder = tmp_path_factory.mktemp("packs")
    write_pairs_of_notes(folder, 4)
    return str(folder)


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    return tmp_path_factory.mktemp("journal") / "journal.jsonl"


@pytest.fixture(scope="module")
def rows(llm, data, journal):
    return quality.measure(llm, replace(SETTINGS, data=data), Journal(journal, {}), lambda: None)


def row_of(rows, method):
    (found,) = [row for row in rows if row["method"] == method]
    return found


def test_every_method_has_a_row_in_order(rows, llm):
    default = next(label for label in (row["method"] for row in rows) if label.startswith(llm.policy.name))
    assert [row["method"] for row in rows] == [OFF, "bfloat16", EXACT, "none", default, VERIFIED, SUBSTITUTED]
    assert {row["suite"] for row in rows} == {"adversarial"}
    assert [row["requests"] for row in rows] == [2, 1, 1, 2, 2, 1, 2]


def test_scores_are_compared_request_by_request(rows):
    for row in rows:
        assert row["score_difference_low"] is None or row["score_difference_low"] <= row["score_difference"]
        assert 0 <= row["denies_share"] <= 1
    off, exact = row_of(rows, OFF), row_of(rows, EXACT)
    assert off["score_difference"] == off["contains_difference"] == exact["score_difference"] == 0
    other = row_of(rows, SUBSTITUTED)
    assert other["score_difference"] == pytest.approx(other["score"] - off["score"])


def test_what_is_exact_is_equal_and_the_rest_has_an_error(rows):
    off, exact, verified = (row_of(rows, name) for name in (OFF, EXACT, VERIFIED))
    assert off["perplexity_ratio"] == exact["greedy_equal_share"] == verified["greedy_equal_share"] == 1
    assert exact["mean_kl"] < 1e-6
    assert exact["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert verified["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert verified["mean_kl"] is None, "a server shows no distributions"
    none, substituted = row_of(rows, "none"), row_of(rows, SUBSTITUTED)
    assert none["reused_share"] > 0.5
    assert none["mean_kl"] > 1e-5
    assert substituted["reused_share"] > 0.5
    assert substituted["mean_kl"] > none["mean_kl"]
    assert all(row["stale_asked"] == row["requests"] for row in rows)


def test_an_interrupted_run_goes_on_and_writes_no_text(rows, llm, data, journal):
    written = journal.read_text()
    assert quality.measure(llm, replace(SETTINGS, data=data), Journal(journal, {}), lambda: None) == rows
    assert journal.read_text() == written
    assert "shelf" not in written
    llm.check()


def test_the_perplexity_is_that_of_the_answer_that_is_served(llm, data):
    """The ratio's numerator, from the probe, is what a request with reuse says of its own tokens."""
    methods = quality.Methods(
        llm, quality.Subject(llm, 900), quality.parse_settings(["none"], [], quality.default_setting(llm))
    )
    requests = quality.load_suite("adversarial", data).requests
    llm.reset()
    methods.instrument.read(requests[0].donor_prompt)
    figures = methods.measure(requests[0], "f1", (requests[0].donor_prompt,), has_controls=False)
    llm.reset()
    methods.instrument.read(requests[0].donor_prompt)
    prompt = methods.instrument.ask(requests[0], "f1").prompt
    sampling = SamplingParams(quality.CONTINUATION_TOKENS, logprobs=0)
    parts = list(llm.stream(prompt, sampling, selection="none", correction="none"))
    assert parts[-1].output.report.spans
    served = -np.mean([part.logprobs.logprob for part in parts if part.logprobs is not None])
    assert figures["none"]["own_nll"] == pytest.approx(served, rel=1e-3)


def test_page_shows_every_method_and_the_claim_beside_it(rows, llm):
    settings = asdict(SETTINGS) | {
        "policy": llm.policy.name,
        "recompute_ratio": llm.policy.recompute_ratio,
        "correction": llm.config.correction,
        "repair": llm.config.repair,
        "repair_below_margin": llm.config.repair_below_margin,
    }
    everything = [*rows, *(row | {"suite": ALL_SUITES} for row in rows)]
    blocks = {
        name: render({"rows": everything, "settings": settings}) for name, render in tables.quality.BLOCKS.items()
    }
    for row in rows:
        name = f"{row['method']}** |" if row["method"] in (OFF, SUBSTITUTED) else f"| {row['method']} |"
        assert blocks["suites"].count(name) == 1, "once: those of each suite are in the record"
    assert [line.split(" | ")[:2] for line in blocks["scores"].splitlines()[2:]] == [
        ["| adversarial", f"**{OFF}**"],
        ["| adversarial", tables.quality.own_method(settings)],
        ["| adversarial", f"**{SUBSTITUTED}**"],
    ]
    text = "\n\n".join(blocks.values())
    assert f"verified: {row_of(rows, VERIFIED)['greedy_equal_share']:.1%}".replace("%", " %") in text
    assert "of its answers to `adversarial` are stale" in text
    assert f"| {tables.quality.own_method(settings)} |" in text, "the engine's own setting is among the rows"
    assert "`python -m benchmarks.suite quality --suites loogle --data packs`" in text
    scored = [row | {"suite": "loogle", "score": 0.25} for row in rows]
    text = tables.quality.BLOCKS["claims"]({"rows": [*everything, *scored], "settings": settings})
    assert f"| 0.250 | off: 0.250, {tables.quality.own_method(settings)}: 0.250 |" in text
