"""Providers behind the semantic hook of a real cache: who is proposed, to whom, and what they need."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.semantic.embedders import PATIENCE_S, BagEmbedder

from kvgraft.errors import ConfigError
from kvgraft.prefix import MatchPrefixParams, RadixCache, RadixKey, RequestRow
from kvgraft.semantic import EmbeddingProvider, MiniLMProvider, SketchProvider, register_embedder, registry
from kvgraft.types import Fidelity

CATS, DOGS = np.arange(1, 21), np.arange(30, 50)
LIKE_CATS = np.append(CATS[::-1], 60)


@pytest.fixture
def embedder():
    made = BagEmbedder()
    register_embedder("bag", lambda **_: made)
    yield made
    made.go.set()


@pytest.fixture
def provider(embedder):
    made = EmbeddingProvider("bag", decode=str)
    yield made
    made.on_shutdown()


def told(provider, *texts):
    for number, text in enumerate(texts):
        provider.on_request_cached(rid=f"r{number}", token_ids=text)
    assert provider.discovery.wait(PATIENCE_S)


def asked(provider, text):
    provider.on_prefix_miss(rid="q", token_ids=text)
    assert provider.discovery.wait(PATIENCE_S)
    return provider.on_prefix_miss(rid="q", token_ids=text)


def cache_of(provider, texts, *, extra_key=None, **options):
    cache = RadixCache()
    cache.set_semantic_provider(provider, **options)
    for number, text in enumerate(texts):
        cache.insert(RadixKey(text, extra_key), np.arange(number * 100, number * 100 + len(text)))
    return cache


def match(cache, text, *, extra_key=None):
    row = RequestRow("q", text, np.empty(0, np.int64))
    return cache.match_prefix(MatchPrefixParams(RadixKey(text, extra_key), row))


def test_the_nearest_prompt_is_proposed_when_it_is_ready(provider, embedder):
    told(provider, CATS, DOGS)
    embedder.go.clear()
    assert provider.on_prefix_miss(rid="q", token_ids=LIKE_CATS) is None
    assert provider.on_prefix_miss(rid="q", token_ids=LIKE_CATS) is None, "still being embedded"
    embedder.go.set()
    assert provider.discovery.wait(PATIENCE_S)
    proposal = provider.on_prefix_miss(rid="q", token_ids=LIKE_CATS)
    assert proposal.alternate_token_ids == CATS.tolist()
    assert proposal.num_cached_tokens == 0
    assert proposal.metadata["similarity"] == pytest.approx(20 / np.sqrt(20 * 21))
    assert proposal.source_id
    assert proposal.skip_insert


@pytest.mark.parametrize(("threshold", "is_found"), [(0.70, True), (0.71, False)])
def test_the_threshold_is_the_least_cosine(embedder, threshold, is_found):
    provider = EmbeddingProvider("bag", threshold=threshold)
    told(provider, CATS)
    prompt = np.concatenate([CATS[::-1], np.repeat([61, 62], [2, 4])])
    assert float(np.prod(embedder.embed([prompt, CATS]), axis=0).sum()) == pytest.approx(0.5**0.5)
    assert (asked(provider, prompt) is not None) == is_found
    provider.on_shutdown()


def test_the_prompt_itself_is_no_donor_nor_what_goes_on_from_it(provider):
    told(provider, LIKE_CATS, np.append(LIKE_CATS, 3), LIKE_CATS[:15])
    assert asked(provider, LIKE_CATS) is None
    told(provider, CATS)
    assert asked(provider, LIKE_CATS).alternate_token_ids == CATS.tolist()


def test_a_prompt_is_remembered_once_and_not_with_its_array(provider, embedder):
    text = CATS.copy()
    told(provider, text, text)
    text[:] = 63
    assert len(provider.discovery) == len(embedder.seen) == 1
    assert asked(provider, LIKE_CATS).alternate_token_ids == CATS.tolist()


def test_a_failing_embedder_is_a_miss(provider, embedder, caplog):
    told(provider, CATS)
    embedder.error = RuntimeError("out of memory")
    assert asked(provider, LIKE_CATS) is None
    assert provider.counters.errors > 0
    assert "out of memory" in caplog.text


def test_after_reset_nothing_is_proposed(provider):
    told(provider, CATS)
    assert asked(provider, LIKE_CATS) is not None
    provider.reset()
    assert asked(provider, LIKE_CATS) is None


def test_with_patience_the_first_question_is_answered(embedder):
    provider = EmbeddingProvider("bag", patience_s=PATIENCE_S)
    told(provider, CATS)
    assert provider.on_prefix_miss(rid="q", token_ids=LIKE_CATS).alternate_token_ids == CATS.tolist()
    provider.on_shutdown()


def test_patience_ends(embedder):
    provider = EmbeddingProvider("bag", patience_s=0.01)
    told(provider, CATS)
    embedder.go.clear()
    assert provider.on_prefix_miss(rid="q", token_ids=LIKE_CATS) is None
    embedder.go.set()
    provider.on_shutdown()


@pytest.mark.parametrize(
    "options",
    [{"patience_s": -1}, {"patience_s": float("inf")}, {"threshold": 0}, {"threshold": 1.01}, {"capacity": 0}],
)
def test_settings_are_checked(options):
    with pytest.raises(ConfigError, match="must be"):
        MiniLMProvider(**options)


class TestInACache:
    @pytest.mark.parametrize("deadline_s", [None, PATIENCE_S])
    def test_another_prompt_s_kv_is_marked_and_not_stored(self, provider, deadline_s):
        cache = cache_of(provider, [CATS, DOGS], deadline_s=deadline_s)
        told(provider, CATS, DOGS)
        first = match(cache, LIKE_CATS)
        assert first.prefix_len == 0
        assert provider.discovery.wait(PATIENCE_S)
        found = match(cache, LIKE_CATS)
        assert (found.substituted, found.prefix_len) == (True, 20)
        assert {span.fidelity for span in found.spans} <= {Fidelity.SUBSTITUTED, Fidelity.SHIFTED}
        assert found.source_id
        cache.set_semantic_provider(None)
        assert match(cache, LIKE_CATS).prefix_len == 0

    def test_another_tenant_s_prompt_is_never_served(self, provider):
        cache = cache_of(provider, [CATS], extra_key="tenant a")
        cache.insert(RadixKey(DOGS, "tenant b"), np.arange(200, 220))
        told(provider, CATS, DOGS)
        assert asked(provider, LIKE_CATS).alternate_token_ids == CATS.tolist()
        for stranger in ("tenant b", None):
            found = match(cache, LIKE_CATS, extra_key=stranger)
            assert (found.prefix_len, found.substituted) == (0, False)
        assert match(cache, LIKE_CATS, extra_key="tenant a").prefix_len == 20

    def test_a_donor_that_was_evicted_is_a_miss(self, provider):
        cache = cache_of(provider, [CATS])
        told(provider, CATS)
        asked(provider, LIKE_CATS)
        cache.evict(20)
        assert match(cache, LIKE_CATS).prefix_len == 0


class TestDecoder:
    @pytest.mark.parametrize(
        "model_config",
        [
            SimpleNamespace(decode=lambda token_ids: f"{len(token_ids)} tokens"),
            SimpleNamespace(
                tokenizer=SimpleNamespace(decode=lambda token_ids: f"{len(token_ids)} tokens"), model_path="/x"
            ),
        ],
        ids=["a tokenizer", "has one"],
    )
    def test_is_taken_from_what_the_engine_says(self, monkeypatch, model_config):
        given = []

        def factory(*, decode, path):
            given.append((decode([1, 2]), path))
            return BagEmbedder()

        monkeypatch.setitem(registry._FACTORIES.by_name, "minilm", factory)
        provider = MiniLMProvider(directory="/weights")
        provider.on_init(model_config)
        assert given == [("2 tokens", "/weights")]
        provider.on_shutdown()

    @pytest.mark.parametrize("name", ["tokenizer", "tokenizer_path", "model_path", "model"])
    def test_is_loaded_from_the_directory_that_is_named(self, monkeypatch, tiny_tokenizer_dir, name):
        given = []
        monkeypatch.setitem(
            registry._FACTORIES.by_name, "minilm", lambda *, decode, path: given.append(decode) or BagEmbedder()
        )
        MiniLMProvider().on_init(SimpleNamespace(**{name: str(tiny_tokenizer_dir)}))
        assert given[0]([1, 2]) == "a b"

    def test_a_directory_without_a_tokenizer_gets_one_line(self, tmp_path):
        provider = EmbeddingProvider("minhash")
        provider.on_init(SimpleNamespace(model_path=str(tmp_path)))
        with pytest.raises(ConfigError, match=r"no tokenizer in .*pass decode=") as raised:
            provider._decode([1, 2])
        assert "\n" not in str(raised.value)

    def test_without_one_the_first_prompt_says_what_to_do(self):
        provider = MiniLMProvider()
        provider.on_init()
        for call in (provider.on_prefix_miss, provider.on_request_cached):
            with pytest.raises(ConfigError, match="give it decode="):
                call(rid="r", token_ids=CATS)
        provider.on_shutdown()

    def test_the_constructor_s_wins(self, monkeypatch):
        given = []
        monkeypatch.setitem(
            registry._FACTORIES.by_name, "minilm", lambda *, decode, path: given.append(decode) or BagEmbedder()
        )
        MiniLMProvider(decode=repr).on_init(SimpleNamespace(decode=str))
        assert given == [repr]


class TestSketchProvider:
    @pytest.mark.parametrize("embedder", ["tfidf", "minhash"])
    def test_needs_no_text_and_answers_the_first_question(self, embedder):
        provider = SketchProvider(embedder)
        provider.on_init()
        rng = np.random.default_rng(0)
        document, other = rng.integers(1_000, 40_000, 2_000), rng.integers(1_000, 40_000, 2_000)
        told(provider, document, other)
        edited = document.copy()
        edited[::100] = 7
        assert provider.on_prefix_miss(rid="q", token_ids=edited).alternate_token_ids == document.tolist()
        assert provider.on_prefix_miss(rid="q", token_ids=rng.integers(1_000, 40_000, 2_000)) is None
        provider.on_shutdown()
