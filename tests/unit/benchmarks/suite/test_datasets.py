"""Table T3 on the bundled model: its shares are exact, its hits are grafts, and it goes on where it stopped."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.suite import datasets, tables
from benchmarks.suite.__main__ import build_parser as suite_parser
from benchmarks.suite.datasets import CHUNK_TOKENS, DatasetsSettings, aligned_tokens, planned
from benchmarks.suite.sources import chosen_datasets
from benchmarks.suite.timing import first_token_times

from kvgraft.bench.datasets import DATASETS as PUBLIC_DATASETS
from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.fidelity.suites import Suite
from kvgraft.bench.journal import Journal
from kvgraft.cli import build_parser
from kvgraft.engine import LLM, SamplingParams
from kvgraft.types import RepairTime

SETTINGS = DatasetsSettings(names=("xtemplate: SAMSum",), limit=2, rounds=2, clock="cpu", max_prompt_tokens=500)
ARTICLE = " ".join(f"Word {number} of the article is followed by the next one." for number in range(12))


def test_aligned_chunks_are_found_at_their_offsets_only():
    rng = np.random.default_rng(0)
    first, other = (rng.integers(0, 1000, 2 * CHUNK_TOKENS + 10).astype(np.int32) for _ in range(2))
    swapped = np.concatenate([first[CHUNK_TOKENS : 2 * CHUNK_TOKENS], first[:CHUNK_TOKENS]])
    shifted = np.concatenate([other[:1], first])
    assert aligned_tokens([first, first]) == (2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    assert aligned_tokens([first, swapped]) == (0, 2 * CHUNK_TOKENS)
    assert aligned_tokens([first, shifted]) == aligned_tokens([first, other]) == (0, 0)


def test_planned_shares_are_of_all_tokens():
    document = "x" * 60
    requests = [FidelityRequest(str(n), (Part(f"{n}" * 4 + document),), ("a",), "a", ()) for n in range(2)]
    row = planned(Suite("s", tuple(requests)), lambda text: np.array([ord(c) for c in text], np.int32), min_run=16)
    assert (row["requests"], row["tokens"], row["wrong_tokens"], row["prefix_share"]) == (2, 128, 0, 0)
    # All but the last token of a document, which is always computed, may be reused in one of two prompts.
    assert row["bound_share"] >= row["reused_share"] > 0.4


@pytest.fixture(scope="module")
def llm():
    return LLM("graft-tiny", num_slots=3_000, repair_below_margin=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three prompts about each of four articles."""
    folder = tmp_path_factory.mktemp("packs")
    asked = ("Say what this is about:", "Below is an article. Continue it in your own words, and be brief:", "Again?")
    lines = [
        {"input": f"{text} {row} {ARTICLE}", "dataset": "samsum", "row": row, "answers": ["It is about words."]}
        for row in range(4)
        for text in asked
    ]
    (folder / "xtemplate.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_a_row_has_times_distance_and_scores_and_an_interrupted_run_goes_on(llm, data, tmp_path):
    settings = replace(SETTINGS, data=data)
    path = tmp_path / "journal.jsonl"
    steps = []
    (row,) = datasets.measure(llm, settings, Journal(path, {}), lambda: steps.append(1))
    assert len(steps) == 3
    assert (row["dataset"], row["kind"], row["requests"], row["sample"]) == ("xtemplate: SAMSum", "workload", 12, 2)
    assert row["bound_share"] >= row["reused_share"] > row["prefix_share"]
    assert row["hits"] == 2
    assert row["sample_reused_share"] > 0.3
    assert row["off_ms"] > 0
    assert row["speedup_all_ratio"] == row["speedup_hits_ratio"] > 0
    assert 0 <= row["mean_kl"] < 1
    assert row["scored"] == 2
    assert row["score_off"] is not None
    assert row["score_difference"] == pytest.approx(row["score_on"] - row["score_off"])
    assert row["mean_kl_low"] <= row["mean_kl"] <= row["mean_kl_high"]
    size = path.stat().st_size
    assert datasets.measure(llm, settings, Journal(path, {}), lambda: None) == [row]
    assert path.stat().st_size == size, "what was measured is not measured again"
    assert "article" not in path.read_text(), "texts of packs stay out of what is written"
    llm.check()


def test_page_has_every_row_and_dashes_for_what_was_not_measured():
    row = dict.fromkeys(
        (
            *("off_ms", "off_p95_ms", "on_ms", "on_p95_ms", "mean_kl", "median_kl", "first_flip_share"),
            *("sample_reused_share", "score_off", "score_on", "contains_off", "contains_on"),
            *(f"speedup_{of}_ratio{end}" for of in ("all", "hits") for end in ("", "_low", "_high")),
        )
    )
    shares = {f"{name}_share": 0.25 for name in ("prefix", "aligned_prefix", "aligned_chunks", "reused", "bound")}
    row |= shares | {"requests": 1200, "tokens": 34567, "wrong_tokens": 0, "scored": 0}
    rows = [
        row | {"dataset": "lines", "kind": "workload", "sample": 0, "hits": 0},
        row
        | {"dataset": "ShareGPT", "kind": "negative control", "sample": 4, "hits": 0, "off_ms": 80.0, "on_ms": 81.0}
        | {"speedup_all_ratio": 0.98, "speedup_all_ratio_low": 0.9, "speedup_all_ratio_high": 1.1},
    ]
    text = "\n".join(render({"rows": rows, "settings": {}}) for render in tables.datasets.BLOCKS.values())
    assert "| lines | 1,200 | 34,567 | 25.0 % |" in text
    assert "| ShareGPT (negative control) | 4 | 0 | - | 0.98x [0.90, 1.10] | - | - | - |" in text, "of an older record"
    figures = {"half_share": 0.25, "greedy_equal_share": 0.5, "score_difference": None}
    newer = tables.datasets.BLOCKS["sample"]({"rows": [each | figures for each in rows], "settings": {}})
    assert "0.98x [0.90, 1.10] | - | - | 50.0 % | - | - |" in newer
    assert "lines: 25.0 % of tokens reused where 25.0 % can be" in text
    assert "| MultiNews | 75 % hits | MultiNews is not among the packs; with a file of it: `kvgraft bench pack" in text
    assert "over all; WildChat is not among the packs" in text, "ShareGPT stands in for it and is none of it"
    chosen = tables.datasets.BLOCKS["claims"]({"rows": rows[:1], "settings": {"names": ["lines"]}})
    assert ("LongEval" in chosen, "MultiNews" in chosen) == (True, False)


def test_the_commands_of_rows_without_data_are_there():
    text = tables.datasets.BLOCKS["claims"]({"rows": [], "settings": {}})
    made = [shlex.split(command) for command in re.findall(r"`(kvgraft [^`]+)`", text)]
    measured = [shlex.split(command) for command in re.findall(r"`python -m benchmarks.suite ([^`]+)`", text)]
    assert len(made) == len(measured) == 9
    for pack, table in zip(made, measured, strict=True):
        name = build_parser().parse_args(pack[1:]).name
        chosen = suite_parser().parse_args(table)
        assert name in PUBLIC_DATASETS
        assert chosen.data == build_parser().parse_args(pack[1:]).output
        assert [each.pack for each in chosen_datasets(chosen.names)] == [name]


def test_times_are_of_both_modes_in_every_round(llm):
    llm.reset()
    prompt = llm.tokenize("What is timed is not kept. " * 6)
    found, report = first_token_times(llm, prompt, 3)
    assert {mode: {clock: len(each) for clock, each in times.items()} for mode, times in found.items()} == {
        "off": {"wall": 3, "cpu": 3},
        "graft": {"wall": 3, "cpu": 3},
    }
    assert report.num_tokens == len(prompt)
    usage = llm.usage()
    assert SimpleNamespace(request=usage.request, cached=usage.cached, donor=usage.donor) == SimpleNamespace(
        request=0, cached=0, donor=0
    )


def test_first_tokens_do_not_wait_for_a_repair_after_them(llm):
    llm.reset()
    document = "A document that is read first, and quoted by what is asked about it. " * 12
    llm.generate(document, SamplingParams(1))
    _, report = first_token_times(llm, llm.tokenize("Something else first. " * 4 + document), 1)
    assert report.shifted_tokens > 0
    assert (report.repair.time, report.repair.from_token) == (RepairTime.AFTER, 2)
