"""Table T11: buckets by the cosine of the earlier prompt that is most like one, and what is reused in each."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks.suite.__main__ import build_parser
from benchmarks.suite.cosine import bucket_rows, nearest_earlier
from benchmarks.suite.tables import cosine

from kvgraft.bench.reuse import PromptReuse
from kvgraft.errors import ConfigError
from kvgraft.semantic import create_embedder

MODEL = ("--model", "graft-tiny", "--num-slots", "4000")


def run(*argv):
    args = build_parser().parse_args(["cosine", *map(str, argv), *MODEL])
    return args.run(args)


def test_nearest_is_the_most_like_of_those_before():
    rng = np.random.default_rng(0)
    text, other = (rng.integers(0, 5_000, 400) for _ in range(2))
    found = nearest_earlier([text, other, text, other[:200], text], create_embedder("minhash"))
    assert found[0] == 0
    assert found[1] < 0.5 < found[3] < 0.9
    assert found[[2, 4]] == pytest.approx(1)


def test_a_bucket_counts_its_own_prompts():
    prompts = [PromptReuse(100, 0, reused, 80) for reused in (0, 50, 49, 80)]
    rows = bucket_rows(prompts, np.array([0, 0.91, 0.95, 0.61], np.float32), seed=0)
    assert [(row["bucket"], row["requests"], row["tokens"]) for row in rows] == [
        ("below 0.5", 1, 100),
        ("0.6-0.7", 1, 100),
        ("0.9-1.0", 2, 200),
    ]
    assert [row["reused_share"] for row in rows] == [0, 0.8, 0.495]
    assert [row["half_share"] for row in rows] == [0, 1, 0.5]
    assert (rows[2]["half_share_low"], rows[2]["half_share_high"], rows[0]["half_share_low"]) == (0, 1, None)
    text = cosine.BLOCKS["buckets"]({"rows": [row | {"dataset": "mturn"} for row in rows]})
    assert "| mturn | 0.9-1.0 | 2 | 200 | 49.5 % [49.0, 50.0] | 80.0 % | 50.0 % [0.0, 100.0] |" in text


def test_the_table_is_planned_and_names_what_is_missing(tmp_path, capsys):
    article = " ".join(f"Sentence {number} of the article." for number in range(30))
    lines = [{"input": f"{start} {article}"} for start in ("First.", "Second.")] + [
        {"input": "Nothing alike at all here."}
    ]
    (tmp_path / "sharegpt_aibrix.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("--data", tmp_path, "--embedder", "minhash", "--journal", tmp_path / "journal", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(row["requests"] for row in found["rows"]) == 3
    assert found["rows"][-1]["half_share"] == 1
    assert "mturn" in found["settings"]["absent"]
    assert "`python -m benchmarks.suite cosine --names wildchat --data packs`" in cosine.BLOCKS["remedy"](found)
    assert not cosine.BLOCKS["remedy"]({"rows": [{"dataset": "WildChat"}]})
    first, second = cosine.panels(found)
    assert [series.name for series in (*first.series, *second.series)] == ["ShareGPT"] * 2
    with pytest.raises(ConfigError, match="none of these data sets is in nowhere"):
        run("--data", "nowhere")
