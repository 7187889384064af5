"""A semantic provider in the embedded engine: what it names stands in where asked for, is told, and is never kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.e2e.test_llm import stock_greedy
from tests.engine_runs import SMALL
from tests.standins.scripted_provider import FOLDER, Script
from transformers import DynamicCache

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError
from kvgraft.fidelity import cache_argument
from kvgraft.memory import Owner
from kvgraft.prefix import RadixKey
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import Fidelity, MissReason, Namespace

GREEDY = SamplingParams(6, ignore_eos=True)
PROVIDER = "scripted_provider:Scripted"
PATIENCE_MS = 60_000


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("tests/standins")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return Script(tmp_path)


def make_llm(family="llama", **settings):
    settings = (
        SMALL | {"num_slots": 2_000, "semantic_provider": PROVIDER, "semantic_deadline_ms": PATIENCE_MS} | settings
    )
    return LLM(adopt_model(family, tiny_model(family), None), **settings)


def text(rng, length=200):
    return rng.integers(3, VOCABULARY, length)


def ask(llm, prompt, reuse="substitute", **options):
    output = llm.generate(prompt, GREEDY, reuse, **options)[0]
    llm.check()
    assert llm.space.allocator.num_held(Owner.REQUEST) == 0
    return output


@torch.inference_mode()
def behind_other_text(llm, other, length, prompt):
    """Greedy answer of the stock model to `prompt`, whose first `length` K/V are those of `other`."""
    ids, past = torch.from_numpy(prompt)[None], DynamicCache()
    with llm.adapter.stock() as model:
        model(torch.from_numpy(other[:length])[None], use_cache=True, **cache_argument(model, past))
        rest, answer = ids[:, length:], []
        for _ in range(GREEDY.max_new_tokens):
            rest = model(rest, use_cache=True, **cache_argument(model, past)).logits[:, -1:].argmax(-1)
            answer.append(int(rest))
    return tuple(answer)


def test_the_named_text_stands_in_and_the_report_says_so(script, rng):
    llm, stored, prompt = make_llm(), text(rng), text(rng, 150)
    ask(llm, stored, "off")
    script.answer(stored.tolist(), source_id="doc-7", metadata={"similarity": np.float32(0.5).item()})
    output = ask(llm, prompt)
    report = output.report
    assert (report.substituted_tokens, report.exact_tokens, report.shifted_tokens) == (149, 0, 0)
    assert [(s.target_start, s.length, s.fidelity) for s in report.spans] == [(0, 149, Fidelity.SUBSTITUTED)]
    assert (report.substitution.source_id, report.substitution.metadata) == ("doc-7", {"similarity": 0.5})
    assert "another text" in report.risk.reason
    assert (report.policy, report.miss) == ("none", None)
    assert output.token_ids == behind_other_text(llm, stored, 149, prompt)


def test_nothing_of_it_is_kept(script, rng):
    llm, stored, prompt = make_llm(), text(rng), text(rng, 150)
    ask(llm, stored, "off")
    script.answer(stored.tolist())
    ask(llm, prompt)
    donors = len(llm.space.donors)
    key = RadixKey(prompt, Namespace(llm.loaded.fingerprint).key)
    assert llm.space.match(key).prefix_len == 0
    assert donors == 1
    script.answer(None)
    for reuse in ("exact", "graft", "off"):
        again = ask(llm, prompt, reuse)
        assert again.report.reused_tokens == (0 if reuse == "exact" else again.report.exact_tokens)
        assert again.report.substituted_tokens == 0
        assert again.token_ids == stock_greedy(llm, prompt, 6)


def test_only_requests_that_ask_for_it_reach_the_provider(script, rng):
    llm = make_llm()
    for reuse in ("off", "exact", "graft"):
        ask(llm, text(rng), reuse)
    assert not script.calls("miss")
    ask(llm, text(rng))
    assert len(script.calls("miss")) == 1


@pytest.mark.parametrize("shared", [1, 40])
def test_a_first_token_or_a_system_prompt_that_is_stored_does_not_silence_it(script, rng, shared):
    llm, stored = make_llm(), text(rng)
    prompt = np.concatenate([stored[:shared], text(rng, 150)])
    ask(llm, stored, "off")
    script.answer(stored.tolist())
    output = ask(llm, prompt)
    assert len(script.calls("miss")) == 1
    assert (output.report.exact_tokens, output.report.substituted_tokens) == (shared, 149)
    assert output.token_ids == behind_other_text(llm, stored, len(prompt) - 1, prompt)


def test_the_exact_prefix_stays_exact_in_front_of_a_text_that_does_not_share_it(script, rng):
    llm, system, other = make_llm(), text(rng, 80), text(rng)
    ask(llm, system, "off")
    ask(llm, other, "off")
    script.answer(other.tolist())
    output = ask(llm, np.concatenate([system, text(rng, 100)]))
    assert (output.report.exact_tokens, output.report.substituted_tokens) == (80, 99)


@pytest.mark.parametrize(("num_new", "asked"), [(64, False), (65, True)])
def test_it_is_asked_where_enough_is_left_to_gain(script, rng, num_new, asked):
    llm, stored = make_llm(), text(rng)
    ask(llm, stored, "off")
    ask(llm, np.concatenate([stored, text(rng, num_new)]))
    assert bool(script.calls("miss")) is asked


def test_equal_text_is_preferred_to_other_text(script, rng):
    llm, document, other = make_llm(), text(rng), text(rng, 300)
    ask(llm, document, "off")
    ask(llm, other, "off")
    script.answer(other.tolist())
    prompt = np.concatenate([text(rng, 30), document, text(rng, 5)])
    assert ask(llm, prompt).report.shifted_tokens > 0
    assert not script.calls("miss")
    assert ask(llm, np.concatenate([text(rng, 150), document[:130], text(rng, 5)])).report.shifted_tokens > 0
    assert not script.calls("miss")
    scrap = np.concatenate([text(rng, 150), document[:40], text(rng, 5)])
    assert ask(llm, scrap).report.substituted_tokens == 194
    script.answer(other.tolist(), 100)
    assert ask(llm, np.concatenate([text(rng, 150), document[40:180], text(rng, 5)])).report.substituted_tokens == 0


def test_a_text_of_another_tenant_is_not_there(script, rng):
    llm, stored = make_llm(), text(rng)
    ask(llm, stored, "off", cache_salt="theirs")
    script.answer(stored.tolist())
    report = ask(llm, text(rng), cache_salt="ours").report
    assert (report.reused_tokens, report.substitution) == (0, None)


@pytest.mark.parametrize(
    ("fields", "is_error"),
    [
        ({"fails": True}, True),
        ({"num_cached_tokens": 10}, False),
        ({"token_ids": ["word"]}, True),
        ({"token_ids": [[1]]}, True),
        ({"token_ids": [[1], [1, 2]]}, True),
        ({"num_cached_tokens": "many"}, True),
        ({"metadata": [1]}, True),
        ({"seconds": 1}, True),
    ],
)
def test_a_useless_answer_is_a_miss(script, rng, fields, is_error):
    llm, stored, prompt = (
        make_llm(semantic_deadline_ms=300 if "seconds" in fields else PATIENCE_MS),
        text(rng),
        text(rng),
    )
    ask(llm, stored, "off")
    script.answer(**({"token_ids": stored.tolist()} | fields))
    output = ask(llm, prompt)
    assert (output.report.reused_tokens, output.report.miss.reason) == (0, MissReason.NO_MATCH)
    assert output.token_ids == stock_greedy(llm, prompt, 6)
    assert bool(llm.num_errors) is is_error


def test_a_negative_number_of_tokens_means_all_that_fit(script, rng):
    llm, stored, prompt = make_llm(), text(rng), text(rng, 150)
    ask(llm, stored, "off")
    script.answer(stored.tolist(), -5)
    output = ask(llm, prompt)
    assert output.report.substituted_tokens == 149
    assert output.token_ids == behind_other_text(llm, stored, 149, prompt)


def test_a_text_that_left_the_cache_is_a_miss(script, rng):
    llm, stored = make_llm(), text(rng)
    ask(llm, stored, "off")
    llm.reset()
    script.answer(stored.tolist())
    assert ask(llm, text(rng)).report.reused_tokens == 0


def test_a_text_stays_until_it_is_copied_however_short_the_room(script, rng):
    llm, stored = make_llm(num_slots=520), text(rng)
    ask(llm, stored, "off")
    script.answer(stored.tolist())
    for _ in range(6):
        output = ask(llm, prompt := text(rng, 250))
        kept = output.report.substituted_tokens
        assert kept in (0, 200)
        expected = behind_other_text(llm, stored, 200, prompt) if kept else stock_greedy(llm, prompt, 6)
        assert output.token_ids == expected


def test_where_text_and_prompt_do_not_fit_together_the_prompt_is_computed(script, rng):
    llm, stored, prompt = make_llm(num_slots=300), text(rng), text(rng, 150)
    ask(llm, stored, "off")
    script.answer(stored.tolist())
    output = ask(llm, prompt)
    assert (output.report.reused_tokens, output.report.miss.reason) == (0, MissReason.NO_ROOM)
    assert output.report.substitution is None
    assert output.token_ids == stock_greedy(llm, prompt, 6)


def test_it_hears_of_exact_text_once_and_of_nothing_approximate(script, rng):
    llm, stored = make_llm(), text(rng)
    output = ask(llm, stored, "off")
    told = script.stored()
    assert [call["token_ids"] for call in told] == [[*stored.tolist(), *output.token_ids[:-1]]]
    script.answer(stored.tolist())
    ask(llm, text(rng))
    ask(llm, np.concatenate([text(rng, 30), stored, text(rng, 5)]), "graft")
    ask(llm, text(rng, 20), "off")  # too short to gain anything, as health checks and warm-ups are
    ask(llm, text(rng, 90), "off")
    assert [len(call["token_ids"]) for call in script.stored()] == [95]


def test_it_starts_and_ends_with_the_engine(script, rng):
    llm = make_llm()
    assert [call["has_config"] for call in script.calls("init")] == [True]
    llm.close()
    llm.close()
    assert len(script.calls("shutdown")) == 1
    make_llm()  # collected at once
    assert [call["call"] for call in script.calls()] == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent_module:Class", "cannot be loaded: ModuleNotFoundError"),
        ("scripted_provider:Absent", "cannot be loaded: AttributeError"),
        ("collections:OrderedDict", "is no kvgraft.substitution.SemanticPrefixProvider"),
        ("kvgraft.substitution:SemanticPrefixProvider", "does not start: TypeError"),
        ("words", "choose module:Class"),
    ],
)
def test_a_wrong_name_is_one_line(script, name, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        make_llm(semantic_provider=name)
    assert "\n" not in str(raised.value)


def test_models_with_windows_have_none(script):
    with pytest.raises(ConfigError, match="semantic_provider does not go with sliding windows"):
        make_llm("gemma3_text", num_slots=20_000)


def test_asking_without_a_provider_says_what_is_missing(rng):
    llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=500)
    with pytest.raises(ConfigError, match="needs a semantic_provider"):
        llm.generate(text(rng, 20), GREEDY, "substitute")
