"""The instrument on the bundled model: controls that must be nothing, and mistakes in the engine that it must show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.bench.fidelity.deviation import deviation
from kvgraft.bench.fidelity.measure import CONTINUATION_TOKENS, Instrument
from kvgraft.bench.fidelity.noise import NoiseFloor
from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.fidelity.run import SuiteRunner, plan_suite
from kvgraft.bench.fidelity.sample import SampledRequest
from kvgraft.bench.fidelity.settings import default_setting, parse_settings
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.bench.fidelity.suites import Suite, load_suite
from kvgraft.bench.journal import Journal
from kvgraft.engine import LLM, RepairRules, SamplingParams
from kvgraft.engine.attention import sequence
from kvgraft.errors import ConfigError
from kvgraft.fidelity import answer_nll
from kvgraft.graft.select import QuerySeam
from kvgraft.types import RepairTime, ReuseMode

pytestmark = pytest.mark.slow

HEAD = "Read the following notes of a manual and answer the question that follows them. Do not invent anything. " * 6
QUESTION = "Question: which of these functions is the most useful one, and why?\nAnswer:"
NUM_PAIRS = 3


@pytest.fixture(scope="module")
def llm():
    return LLM("graft-tiny", num_slots=6_000)


@pytest.fixture(autouse=True)
def _empty_cache(llm):
    llm.reset()
    yield
    llm.check()


@pytest.fixture(scope="module")
def subject(llm):
    return Subject(llm, 1_000)


@pytest.fixture(scope="module")
def documents():
    parts = {part.document: part for request in load_suite("builtin", "").requests for part in request.parts}
    return [part for name, part in sorted((name, part) for name, part in parts.items() if name is not None)]


@pytest.fixture(scope="module")
def pairs(documents):
    """Requests that begin alike, two by two over the same three documents in another order."""
    return [
        tuple(make_request(f"{n}{name}", [documents[3 * n + i] for i in order]) for name, order in ORDERS.items())
        for n in range(NUM_PAIRS)
    ]


ORDERS = {"first": (0, 1, 2), "second": (2, 0, 1)}


def make_request(rid, documents, answers=("It is the first one.",)):
    keys = tuple(part.document for part in documents)
    return FidelityRequest(rid, (Part(HEAD), *documents, Part(QUESTION)), keys, "group", answers)


def make_instrument(llm, subject, *specs):
    return Instrument(llm, subject, parse_settings(specs, [], default_setting(llm)))


def measured(instrument, llm, pairs):
    """Records of the second request of every pair, behind the first."""
    records = []
    for first, second in pairs:
        llm.reset()
        instrument.read(first.prompt)
        records.append(instrument.measure(SampledRequest(0, second, (), False), instrument.ask(second, "f1")))
    return records


def mean_kl(records, label):
    return float(np.mean([record["settings"][label]["mean_kl"] for record in records]))


@pytest.fixture(scope="module")
def records(llm, subject, pairs):
    """Of every pair under three settings."""
    return measured(make_instrument(llm, subject, "none", "query_seam:0.3", "query_seam:0.7"), llm, pairs)


class TestFigures:
    def test_grafts_differ_less_the_more_is_computed(self, records):
        none, some, most = (mean_kl(records, label) for label in ("none", "query_seam:0.3", "query_seam:0.7"))
        assert none > some > 3 * most > 1e-6

    def test_shares(self, records):
        for record in records:
            none, some, most = record["settings"].values()
            shares = [each["recomputed_share"] for each in (none, some, most)]
            assert shares == pytest.approx([0, 0.3, 0.7], abs=0.02)
            assert 0 < none["flops_share"] < some["flops_share"] < most["flops_share"]
            assert none["exact_tokens"] > 50
            assert none["shifted_tokens"] > 200
            assert none["distance"] == "reordered"

    def test_answers_are_those_that_the_engine_would_give(self, llm, subject, pairs, records, monkeypatch):
        """The decoded answer under reuse, without leaving a trace, is what a request gets."""
        first, second = pairs[0]
        instrument = make_instrument(llm, subject, "none")
        texts = []
        monkeypatch.setattr(subject, "text", lambda tokens: texts.append([int(token) for token in tokens]) or "")
        instrument.read(first.prompt)
        asked = instrument.ask(second, "f1")
        instrument.measure(SampledRequest(0, second, (), False), asked)
        served = llm.generate(asked.prompt, SamplingParams(CONTINUATION_TOKENS), selection="none")[0]
        under_reuse, _ = texts
        assert under_reuse[: len(served.token_ids)] == list(served.token_ids)

    def test_answers_with_rows_in_every_step_are_those_that_the_engine_would_give(
        self, llm, subject, pairs, monkeypatch
    ):
        first, second = pairs[0]
        instrument = make_instrument(llm, subject, "none", "query_seam:0.1@after:16")
        texts = []
        monkeypatch.setattr(subject, "text", lambda tokens: texts.append([int(token) for token in tokens]) or "")
        monkeypatch.setattr(subject, "answer_len", lambda tokens: CONTINUATION_TOKENS + 1)  # every answer is decoded
        instrument.read(first.prompt)
        asked = instrument.ask(second, "f1")
        figures = instrument.measure(SampledRequest(0, second, (), False), asked)["settings"]["query_seam:0.1@after:16"]
        rules = RepairRules(RepairTime.AFTER, rows_per_step=16)
        sampling = SamplingParams(CONTINUATION_TOKENS)
        served = llm.generate(asked.prompt, sampling, selection=QuerySeam(0.1), correction="none", repair=rules)[0]
        assert texts[1] == list(served.token_ids)
        assert len(figures["token_kl"]) == CONTINUATION_TOKENS
        assert np.mean(figures["token_kl"]) == pytest.approx(figures["mean_kl"], rel=1e-3)
        assert figures["token_kl"][0] == pytest.approx(figures["first_kl"], rel=1e-3)
        assert figures["recomputed_share"] == pytest.approx(0.1, abs=0.02)
        assert "gold_nll" not in figures

    def test_the_right_answer_is_scored_behind_the_prompt(self, llm, subject, pairs):
        """Behind the continuation in one prefill, as alone in one of its own."""
        instrument = make_instrument(llm, subject, "none")
        (record,) = measured(instrument, llm, pairs[:1])
        asked = instrument.ask(pairs[0][1], "f1")
        alone = llm.score(asked.prompt, asked.gold, selection="none").logits
        assert record["settings"]["none"]["gold_nll"] == pytest.approx(answer_nll(alone, asked.gold.tolist()), rel=1e-4)
        full = llm.score(asked.prompt, asked.gold, ReuseMode.OFF).logits
        torch.testing.assert_close(asked.reference.gold_logits, full, rtol=1e-3, atol=1e-3)

    def test_nothing_is_left_in_the_cache(self, llm, subject, pairs):
        instrument = make_instrument(llm, subject, "none", "query_seam:0.3")
        instrument.read(pairs[0][0].prompt)
        before = llm.usage()
        instrument.measure(SampledRequest(0, pairs[0][1], (), False), instrument.ask(pairs[0][1], "f1"))
        assert llm.usage() == before


class TestControls:
    def test_exact_prefix_unseen_text_and_number_format(self, llm, subject, pairs):
        instrument = make_instrument(llm, subject, "none")
        first, _ = pairs[0]
        asked = instrument.ask(first, "f1")
        unseen = instrument.control(asked, ReuseMode.GRAFT)
        instrument.read(first.prompt)
        exact = instrument.control(asked, ReuseMode.EXACT)
        noise = NoiseFloor(llm).measure(asked)
        assert unseen["mean_kl"] < 1e-9
        assert not unseen["is_grafted"]
        assert exact["mean_kl"] < 1e-9
        assert exact["exact_tokens"] == len(asked.prompt) - 1
        assert 1e-7 < noise.mean_kl < 1e-2

    def test_where_nothing_is_grafted_other_settings_are_left_out(self, llm, subject, pairs):
        instrument = make_instrument(llm, subject, "none", "query_seam:0.3")
        record = instrument.measure(SampledRequest(0, pairs[0][0], (), False), instrument.ask(pairs[0][0], "f1"))
        assert list(record["settings"]) == ["none"]
        assert not record["settings"]["none"]["is_grafted"]
        assert record["settings"]["none"]["mean_kl"] < 1e-9


class TestWouldHaveCaught:
    def test_a_mask_that_lets_recomputed_tokens_see_the_future(self, llm, subject, pairs, records, monkeypatch):
        instrument = make_instrument(llm, subject, "none", "query_seam:0.3")
        right = mean_kl(records[:1], "query_seam:0.3")
        visible, formed = sequence.SequenceAttention._visible, sequence.SequenceAttention._formed_mask

        def is_query(self, rows):  # what is computed anyway stays right
            return int(self.positions[rows.start]) >= self.num_keys - 64

        def all_of_it(self, rows, window):
            return visible(self, rows, window) if is_query(self, rows) else slice(0, self.num_keys)

        def without_future(self, rows, keys, layer):
            mask = formed(self, rows, keys, layer)
            return mask if is_query(self, rows) else torch.zeros_like(mask)

        monkeypatch.setattr(sequence.SequenceAttention, "_visible", all_of_it)
        monkeypatch.setattr(sequence.SequenceAttention, "_formed_mask", without_future)
        wrong = measured(instrument, llm, pairs[:1])
        assert mean_kl(wrong, "query_seam:0.3") > 3 * right

    def test_a_ranking_off_by_the_prefix_length(self, llm, subject, pairs, records, monkeypatch):
        instrument = make_instrument(llm, subject, "query_seam:0.3")
        right = mean_kl(records, "query_seam:0.3")

        score = QuerySeam._score

        def off_by_the_prefix(self, context, observation):
            prefix_len = int(min(context.live[0], context.reused[0]))
            return np.roll(score(self, context, observation), prefix_len)

        monkeypatch.setattr(QuerySeam, "_score", off_by_the_prefix)
        wrong = mean_kl(measured(instrument, llm, pairs), "query_seam:0.3")
        assert wrong > 1.3 * right


class TestRun:
    @pytest.fixture
    def plan(self, pairs, subject):
        suite = Suite("toy", tuple(request for pair in pairs[:2] for request in pair))
        return plan_suite(suite, subject, side="all", limit=4, seed=0)

    def make_runner(self, llm, subject, num_controls=0):
        settings = parse_settings(["none"], [], default_setting(llm))
        return SuiteRunner(llm, subject, settings, num_controls=num_controls, seed=0)

    def figures(self, journal):
        records = [dict(record) for record in journal.under("toy")]
        for record in records:
            for outcome in record["settings"].values():
                del outcome["seconds"]
        return records

    def test_an_interrupted_run_ends_as_a_whole_one(self, llm, subject, plan, tmp_path):
        whole = Journal(None, {})
        self.make_runner(llm, subject).run(plan, whole, lambda: None)
        path = tmp_path / "f.requests.jsonl"
        seconds = 0

        def interrupt():
            nonlocal seconds
            seconds += 1
            if seconds == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.make_runner(llm, subject).run(plan, Journal(path, {}), interrupt)
        resumed = Journal(path, {})
        assert len(resumed) == 3
        self.make_runner(llm, subject).run(plan, resumed, lambda: None)
        assert self.figures(Journal(path, {})) == self.figures(whole)
        shifted = [record["settings"]["none"]["shifted_tokens"] for record in whole.under("toy")]
        assert max(shifted[::2]) < 100  # those behind the first begin and end like it
        assert min(shifted[1::2]) > 200

    def test_a_finished_run_computes_nothing(self, llm, subject, plan, monkeypatch):
        journal = Journal(None, {})
        for index in plan.sample.indices:
            journal.add({"suite": "toy", "index": index})
        monkeypatch.setattr(Instrument, "ask", None)
        monkeypatch.setattr(Instrument, "read", None)
        calls = []
        self.make_runner(llm, subject).run(plan, journal, lambda: calls.append(1))
        assert len(calls) == 4

    def test_controls_of_the_first_requests(self, llm, subject, plan):
        journal = Journal(None, {})
        self.make_runner(llm, subject, num_controls=1).run(plan, journal, lambda: None)
        first, *others = journal.under("toy")
        assert set(first["controls"]) == {"exact", "negative", "noise"}
        assert not first["controls"]["negative"]["is_grafted"]
        assert first["controls"]["negative"]["mean_kl"] < 1e-9
        assert not any(record["controls"] for record in others)

    def test_nothing_to_measure_is_said(self, llm, subject):
        with pytest.raises(ConfigError, match=r"no request to measure .*raise --max-prompt-tokens"):
            plan_suite(
                Suite("toy", (make_request("0", [Part("word " * 3_000, "long")]),)),
                subject,
                side="all",
                limit=1,
                seed=0,
            )
        with pytest.raises(ConfigError, match="it is empty"):
            plan_suite(Suite("toy", ()), subject, side="dev", limit=1, seed=0)


def test_a_pair_s_stale_answer_is_told(llm, subject, documents, monkeypatch):
    """A suite's `stale` answers are looked for on both sides."""
    asked, cached = (
        f"{documents[0].text}\nIt has {number} arches.\n{documents[1].text}" for number in ("seven", "twelve")
    )
    parts = (Part(asked, "b"), Part(QUESTION))
    request = FidelityRequest("0 a->b", parts, ("s",), "s", ("seven",), ("twelve",), (cached, QUESTION))
    instrument = make_instrument(llm, subject, "none")
    instrument.read(request.donor_prompt)
    monkeypatch.setattr(subject, "text", lambda _: "twelve arches")
    record = instrument.measure(SampledRequest(0, request, (), False), instrument.ask(request, "f1"))
    assert (record["off"]["stale"], record["settings"]["none"]["stale"]) == (1.0, 1.0)
    assert record["settings"]["none"]["distance"] == "edited neighbour"


def test_the_oracle_is_told_of_each_prompt(llm, subject, pairs):
    """Where K/V differ from a full prefill's it must see it, and nowhere else."""
    first, second = pairs[0]
    instrument = make_instrument(llm, subject, "none", "oracle:0.3")
    instrument.read(first.prompt)
    prompt = subject.encode(second.prompt)
    far = deviation(llm, prompt)
    with llm.probe(prompt, 1, selection="none", correction="none") as probe:
        spans = probe.report.spans
        assert spans
        reused = np.concatenate([np.arange(span.target_start, span.target_start + span.length) for span in spans])
    assert far[: probe.report.exact_tokens].max() < 1e-4 < far[reused].mean()
    record = instrument.measure(SampledRequest(0, second, (), False), instrument.ask(second, "f1"))
    found = record["settings"]
    assert list(found) == ["none", "oracle:0.3"]
    assert found["oracle:0.3"]["recomputed_share"] == pytest.approx(0.3, abs=0.02)
    assert found["oracle:0.3"]["mean_kl"] < found["none"]["mean_kl"]
