"""Nothing approximate is ever served as exact, tenants share nothing, and memory returns to where it was."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from engines import engine, text
from kvgraft.donors import DonorQuery
from kvgraft.integrations.vllm.scheduler.namespaces import namespace_of

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
CAPACITY = 3000
BYTES_PER_TOKEN = 2 * 2 * 32 * 4 * 4  # keys and values, heads, width, float32, layers


@pytest.fixture(scope="module")
def served(model_folder):
    options = {"selection": "none", "host_bytes": CAPACITY * BYTES_PER_TOKEN}
    with engine(model_folder, "llama", options=options) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    yield
    served.check()


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_a_grafted_request_leaves_nothing_approximate_in_the_prefix_cache(served, mode):
    served.donate(HEAD + DOCUMENT + QUESTION)
    prompt = OTHER_HEAD + DOCUMENT + OTHER_QUESTION
    cold = served.cold(prompt)
    grafted = served.ask(prompt, max_tokens=80)
    assert grafted.shifted == len(DOCUMENT)
    after = served.ask(prompt, mode)
    assert after.num_cached <= len(OTHER_HEAD) // 32 * 32, "only the head in front of the graft is exact"
    assert after.report["shifted_tokens"] == 0
    after.assert_like(cold)
    again = served.ask(prompt, mode)
    assert again.num_cached > len(OTHER_HEAD) + len(DOCUMENT), "what was computed exactly is a prefix"
    again.assert_like(cold)


def test_the_answer_of_a_grafted_request_is_no_prefix_either(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    prompt = OTHER_HEAD + DOCUMENT + OTHER_QUESTION
    grafted = served.ask(prompt, max_tokens=100)
    conversation = prompt + list(grafted.tokens)
    follow_up = served.ask(conversation, "exact")
    assert follow_up.num_cached <= len(OTHER_HEAD)
    follow_up.assert_like(served.cold(conversation))


def test_the_exact_head_in_front_of_a_graft_is_published(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    served.ask(OTHER_HEAD + DOCUMENT + OTHER_QUESTION)
    prompt = OTHER_HEAD + text(50, 100)
    head = served.ask(prompt, "exact")
    assert head.num_cached == len(OTHER_HEAD) // 32 * 32
    head.assert_like(served.cold(prompt))


def test_grafts_behind_an_exact_prefix(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    prompt = text(40, 96) + DOCUMENT + QUESTION
    served.ask(text(40, 96) + text(41, 50), "exact")  # its first three blocks are cached
    warm = served.ask(prompt)
    assert warm.report["exact_tokens"] == 96
    assert warm.shifted == len(DOCUMENT) + len(QUESTION) - 1


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_requests_choose_their_mode(served, mode):
    served.donate(HEAD + DOCUMENT + QUESTION)
    answer = served.ask(OTHER_HEAD + DOCUMENT + OTHER_QUESTION, mode)
    assert answer.shifted == 0
    assert answer.report["miss"]["reason"] == "reuse_off"
    assert len(served.scheduler.registry.catalogue) == (1 if mode == "off" else 2)


def test_an_unknown_mode_reuses_nothing_and_says_so(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    answer = served.ask(OTHER_HEAD + DOCUMENT + OTHER_QUESTION, "grafted")
    assert answer.shifted == 0
    assert "must be off, exact, graft, substitute, verified, not 'grafted'" in answer.report["miss"]["detail"]


def test_another_cache_salt_shares_nothing(served):
    prompt = HEAD + DOCUMENT + QUESTION
    served.ask(prompt, cache_salt="one")
    served.llm.reset_prefix_cache()
    assert served.ask(OTHER_HEAD + DOCUMENT, cache_salt="two").shifted == 0
    assert served.ask(OTHER_HEAD + DOCUMENT).shifted == 0
    assert served.ask(OTHER_HEAD + DOCUMENT, cache_salt="one").shifted > 0


def _request(lora=None, images=(), salt=None):
    lora = SimpleNamespace(lora_name=lora, lora_int_id=1, lora_path="") if lora else None
    features = [SimpleNamespace(identifier=image) for image in images]
    return SimpleNamespace(lora_request=lora, mm_features=features, cache_salt=salt)


def test_namespaces_differ_by_adapter_images_and_salt():
    """vllm#42119, #44250, #53495, #44701, LMCache#4086, #4783, sglang#37160: keys leave something out.

    There an adapter named like a salt has its K/V, or two images of one size have the same 16 bits. Here none share a key.
    """
    variants = [
        _request(),
        _request(lora="a"),
        _request(lora="b"),
        _request(images=["x"]),
        _request(images=["y"]),
        _request(images=["x", "y"]),
        _request(salt="s"),
        _request(salt="a"),
        _request(salt='["a", 1, ""]'),
        _request(lora="a", salt="s"),
        _request(lora="s", salt="a"),
        _request(images=["x"], salt="y"),
        _request(lora="a", images=["x"]),
    ]
    keys = {namespace_of(request, "model").key for request in variants}
    assert len(keys) == len(variants)
    assert namespace_of(_request(), "other").key not in keys


def test_donors_of_other_namespaces_are_not_found(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    catalogue, prompt = served.scheduler.registry.catalogue, np.asarray(OTHER_HEAD + DOCUMENT)
    fingerprint = served.scheduler._facts.fingerprint
    assert catalogue.find(DonorQuery(namespace_of(_request(), fingerprint), prompt))
    for other in (_request(lora="a"), _request(images=["x"]), _request(salt="s")):
        assert not catalogue.find(DonorQuery(namespace_of(other, fingerprint), prompt))
    assert not catalogue.find(DonorQuery(namespace_of(_request(), "another model"), prompt))


@pytest.mark.parametrize("kind", ["lora_request", "mm_features", "prompt_embeds", "skip_reading_prefix_cache"])
def test_requests_that_cannot_be_grafted_are_told_so(served, kind, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    original = served.vllm_scheduler.connector.get_num_new_matched_tokens
    given = {
        "lora_request": _request(lora="a").lora_request,
        "mm_features": _request(images=["x"]).mm_features,
        "prompt_embeds": object(),
        "skip_reading_prefix_cache": True,
    }

    def asked(request, num_computed_tokens):
        with monkeypatch.context() as patch:
            patch.setattr(request, kind, given[kind])
            return original(request, num_computed_tokens)

    monkeypatch.setattr(served.vllm_scheduler.connector, "get_num_new_matched_tokens", asked)
    answer = served.ask(OTHER_HEAD + DOCUMENT + OTHER_QUESTION)
    assert answer.shifted == 0
    assert answer.report["miss"]["reason"] == "model_refused"


def test_host_memory_keeps_to_its_budget_and_returns_to_nothing(served):
    """Each text has 400 tokens, and 3,000 fit: donors come and go, and workers forget what the catalogue forgets."""
    for number in range(20):
        served.ask(text(300 + number, 400), "exact", max_tokens=2)
        catalogue, store = served.scheduler.registry.catalogue, served.worker._donors
        store.check()
        assert catalogue.num_tokens <= CAPACITY
        assert store.used_bytes <= CAPACITY * BYTES_PER_TOKEN
    assert 0 < len(catalogue) <= 7
    newest = served.ask(text(1, 33) + text(319, 400))
    assert newest.shifted >= 399
    oldest = served.ask(text(2, 33) + text(300, 400))
    assert oldest.shifted == 0
    served.forget_donors()
    served.ask(text(3, 20), "off")  # a step, in which workers hear of it
    assert store.used_bytes == 0


def test_host_memory_is_told_on_a_server_that_only_captures(served):
    served.ask(text(400, 300), "exact", max_tokens=2)
    assert served.scheduler.host_bytes >= 300 * BYTES_PER_TOKEN
    assert served.scheduler.host_bytes == served.worker._donors.used_bytes
    served.forget_donors()
    served.ask(text(3, 20), "off")
    assert served.scheduler.host_bytes == 0


def test_a_text_longer_than_the_budget_becomes_no_donor(model_folder, served):
    registry = served.scheduler.registry
    refused = registry.num_refused_texts
    assert registry.open(0, CAPACITY + 1, 0) is None
    assert registry.num_refused_texts == refused + 1
