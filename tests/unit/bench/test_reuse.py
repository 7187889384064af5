"""Replaying a workload: figures of small workloads that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.bench import reuse as reuse_module
from kvgraft.bench.packs import PackSession, Workload
from kvgraft.bench.reuse import measure_reuse
from kvgraft.bench.tokenization import PieceTokenizer, load_tokenizer
from kvgraft.errors import ConfigError


def words(start, count):
    return " ".join(f"w{i}" for i in range(start, start + count))


def tokenize(text):
    return np.array([int(word[1:]) for word in text.split()], np.int32)


def measure(*prompts, cached=(), min_run=32, **options):
    workload = Workload("name", (PackSession(tuple(cached), tuple(prompts)),))
    return measure_reuse(workload, tokenize, min_run=min_run, **options)


def counts(result):
    return (result.prefix_tokens, result.reused_tokens, result.bound_tokens, result.wrong_tokens)


def test_shifted_document_is_reused_from_a_donor():
    result = measure(words(0, 100), words(1_000, 10) + " " + words(0, 100) + " w7")
    assert (result.requests, result.tokens) == (2, 211)
    assert counts(result) == (0, 100, 100, 0)
    assert result.recovered == 1


def test_prefix_counts_to_the_token_and_the_last_token_never():
    assert counts(measure(words(0, 100), words(0, 100))) == (99, 99, 99, 0)
    assert counts(measure(words(0, 100), words(0, 50) + " " + words(500, 50))) == (50, 50, 50, 0)


def test_prefix_below_the_shortest_run_counts_nowhere():
    assert counts(measure(words(0, 100), words(0, 31) + " " + words(500, 50))) == (0, 0, 0, 0)


def test_prefix_and_span_add_up():
    later = words(0, 50) + " w900 " + words(60, 40) + " w901"
    assert counts(measure(words(0, 100), later)) == (50, 90, 90, 0)


def test_prompts_that_are_reused_by_half_are_counted():
    document = words(0, 50)
    result = measure("", document, words(200, 49) + " " + document, words(300, 51) + " " + document)
    assert [prompt.reused_tokens for prompt in result.prompts] == [0, 0, 49, 49]
    assert result.half_reused == 0
    assert measure(document, words(200, 48) + " " + document).half_reused == 1


def test_nothing_in_common_recovers_all_of_nothing():
    result = measure(words(0, 50), words(100, 50))
    assert counts(result) == (0, 0, 0, 0)
    assert result.recovered == 1


def test_cached_prompts_are_donors_and_not_counted():
    result = measure("w5 " + words(100, 60), cached=[words(100, 60)])
    assert (result.requests, result.tokens) == (1, 61)
    assert counts(result) == (0, 59, 59, 0)


def test_sessions_do_not_see_each_other():
    sessions = (PackSession((), (words(0, 60),)), PackSession((), (words(0, 60),)))
    assert counts(measure_reuse(Workload("x", sessions), tokenize, min_run=32)) == (0, 0, 0, 0)


def test_small_capacity_forgets_and_the_bound_does_not():
    first, second = words(0, 60), words(200, 60)
    result = measure(first, second, "w900 " + first, capacity=100)
    assert counts(result) == (0, 0, 59, 0)
    assert result.recovered == 0


def test_prompt_larger_than_the_catalogue_is_no_donor():
    assert counts(measure(words(0, 60), "w900 " + words(0, 60), capacity=50)) == (0, 0, 59, 0)


def test_empty_and_short_prompts_are_counted_and_reuse_nothing():
    result = measure("", "w1", words(0, 5), words(0, 5))
    assert (result.requests, result.tokens) == (4, 11)
    assert counts(result) == (0, 0, 0, 0)


def test_wrong_tokens_are_counted(monkeypatch):
    class Lying(reuse_module.DonorCatalogue):
        def find(self, *args, **kwargs):
            matches = super().find(*args, **kwargs)
            return [type(m)(m.target_start, m.donor_id, m.donor_start + 1, m.length - 1) for m in matches]

    monkeypatch.setattr(reuse_module, "DonorCatalogue", Lying)
    assert measure(words(0, 100), words(900, 10) + " " + words(0, 100)).wrong_tokens == 99


def test_result_as_dict_has_the_documented_keys():
    result = measure(words(0, 60), words(0, 60)).as_dict()
    assert list(result) == [
        "workload",
        "requests",
        "tokens",
        "prefix_tokens",
        "reused_tokens",
        "bound_tokens",
        "recovered",
        "half_reused",
        "wrong_tokens",
        "lookup_ms",
        "register_ms",
    ]
    assert set(result["lookup_ms"]) == {"p50", "p99", "max"}
    assert set(result["register_ms"]) == {"p50", "p99"}


def test_every_prompt_advances_the_progress():
    calls = []
    measure(words(0, 20), words(0, 20), cached=[words(0, 20)], advance=lambda: calls.append(1))
    assert len(calls) == 3


def test_pieces_are_numbered_and_equal_pieces_have_equal_ids():
    tokenizer = PieceTokenizer()
    ids = tokenizer("to be, or not to be").tolist()
    assert ids == tokenizer("to be, or not to be").tolist()
    assert len(set(ids)) == 6
    assert ids[1] == ids[6]
    assert len(tokenizer("internationalisation")) == 4
    assert tokenizer("").tolist() == []


def test_pieces_of_a_text_do_not_depend_on_what_is_in_front():
    tokenizer = PieceTokenizer()
    text = "def f(x):\n    return x + 1  # größer\n"
    assert tokenizer("Something else.\n\n" + text)[-20:].tolist() == tokenizer("\n\n" + text)[-20:].tolist()


def test_missing_tokenizer_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer file"):
        load_tokenizer(str(tmp_path / "none.json"))


def test_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a Hugging Face tokenizers"):
        load_tokenizer(str(tmp_path / "x.json"))
