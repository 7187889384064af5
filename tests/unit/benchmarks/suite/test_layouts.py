"""The layouts of `engines` and `peers`, whose rows are of other programs."""

from __future__ import annotations

from benchmarks.suite.tables import engines, peers


def engine_row(variant, **changes):
    row = {"engine": "vLLM", "workload": "documents", "variant": variant, "reused_share": 0.5, "hit_share": 0.75}
    row |= {"ttft_ms": 1234.5, "ttft_p95_ms": 2000.0, "ttft_ratio": 2.0, "ttft_ratio_low": 1.5, "ttft_ratio_high": 2.5}
    return row | {"same_first_token_share": 0.9} | changes


def peer_row(peer, case, **changes):
    row = {"peer": peer, "case": case, "prompt_tokens": 452, "reused_tokens": 400, "reused_share": 0.885, "gap": 0.01}
    row |= {"ttft_ratio": 3.0, "ttft_ratio_low": 2.0, "ttft_ratio_high": 4.0, "same_first_token_share": 1.0}
    row |= {"one_layer_gap": 0.0, "one_layer_reused_tokens": 400, "one_layer_unrelated_gap": 0.4}
    return row | changes


def line_of(text, *words):
    return next(line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words))


def columns(text):
    return {line.count("|") - 1 for line in text.splitlines() if line.startswith("|")}


def test_engines_have_a_line_per_variant():
    rates = {"requests_per_s": 0.8, "limit_ms": 3000.0, "p95_at_rate_ms": 2500.0, "rate_ratio": 1.6}
    rows = [
        engine_row("off", reused_share=0.0),
        engine_row("kvgraft", **rates),
        engine_row("kvgraft", workload="new text"),
    ]
    text = engines.BLOCKS["engines"]({"rows": rows})
    line = line_of(text, "documents", "kvgraft")
    assert "| 50% | 1,234 ms | 2,000 ms | 2.00x [1.50, 2.50] | 90% | 0.80 (3,000 ms) |" in line
    assert columns(text) == {9}


def test_an_engine_that_did_not_start_and_a_rate_that_none_sustained_are_shown():
    failed = {"engine": "SGLang", "workload": "documents", "variant": "-", "failure": "no room"}
    none = engine_row("kvgraft", requests_per_s=0.0, limit_ms=900.0, p95_at_rate_ms=None, rate_ratio=None)
    text = engines.BLOCKS["engines"]({"rows": [failed, none]})
    assert "| - | failed: no room |" in line_of(text, "SGLang")
    assert "none of those tried (900 ms)" in line_of(text, "vLLM")
    assert columns(text) == {9}


def test_kv_that_do_not_belong_where_they_are_show_with_one_layer():
    rows = [
        peer_row("ours", "prefix"),
        peer_row("ours", "moved"),
        peer_row("theirs", "prefix"),
        peer_row("theirs", "front", one_layer_gap=0.25, one_layer_unrelated_gap=0.1),
        peer_row("theirs", "unrelated", one_layer_reused_tokens=0, reused_tokens=0, one_layer_unrelated_gap=0.3),
        {"peer": "gone", "case": "-", "failure": "there is no gone"},
    ]
    text = peers.BLOCKS["peers"]({"rows": rows})
    assert line_of(text, "ours", "moved").endswith("| yes |")
    assert line_of(text, "theirs", "front").endswith("| **no** |")
    assert line_of(text, "theirs", "unrelated").endswith("| nothing reused |")
    assert "failed: there is no gone" in line_of(text, "gone")
    assert columns(text) == {6}


def test_rounding_of_a_peer_is_what_it_shows_for_an_equal_prefix():
    rows = [peer_row("p", "prefix", one_layer_gap=0.2), peer_row("p", "deleted", one_layer_gap=0.15)]
    limit = peers.allowed_gap(rows)
    assert limit == 0.2
    assert [peers.is_right(row, limit) for row in rows] == [True, True]
    assert peers.is_right(peer_row("p", "front", one_layer_gap=0.21), limit) is False
