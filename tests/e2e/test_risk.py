"""A stated risk on the embedded engine: which notch is served, what reports say, and audits that judge what was served."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re

import numpy as np
import pytest
import torch

from kvgraft.engine import LLM, AsyncLLM, RepairRules, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle import audit
from kvgraft.engine.inspection import Inspection
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.risk import OWN_SETTINGS, WITHDRAWN, risk_binding
from kvgraft.engine.schedule.active import Phase
from kvgraft.errors import ConfigError
from kvgraft.fidelity import stock_logits
from kvgraft.fidelity.control import AnswerPart, Calibration, NotchResult, PartResult, save_calibration
from kvgraft.fidelity.control.notches import notches_of
from kvgraft.graft.select import QuerySeam
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import UNCALIBRATED, MissReason, RepairTime, ReuseMode, RiskStatus

ANSWER = SamplingParams(4, ignore_eos=True)
SETTINGS = {"num_slots": 4_000, "selection": "query_seam", "repair_below_margin": 0}
PATIENCE_S = 120.0


def loaded(dtype=torch.float32):
    return adopt_model("llama", tiny_model("llama", dtype=dtype), None)


@pytest.fixture(scope="module")
def tiny():
    """The tiny model without a calibration, for what a calibration is bound to."""
    return LLM(loaded(), **SETTINGS)


@pytest.fixture
def calibrated(tmp_path, tiny):
    """Return a function that writes a calibration for the tiny model at a notch; gives the settings that use it."""

    def write(notch, loss="first_token", epsilon=0.02, *, repair="after", **changes):
        names = tuple(each.name for each in notches_of(tiny.policy, RepairTime(repair)))
        certified = names[1 : 1 + names.index(notch)]
        parts = (PartResult(AnswerPart.WHOLE, 500, 0.0, 0.006, 1e-5),)
        results = tuple(NotchResult(name, parts, name in certified, 0.1) for name in names[1:])
        binding = risk_binding(tiny.config, tiny.loaded, tiny.policy) | {"repair": repair}
        found = Calibration(binding, loss, epsilon, 0.05, notch, names, 500, results, "2026-11-22", {"model": "llama"})
        path = tmp_path / "calibration.json"
        save_calibration(path, dataclasses.replace(found, **changes))
        return SETTINGS | {"calibration": str(path), "repair": repair}

    return write


@pytest.fixture
def document(rng):
    return rng.integers(3, VOCABULARY, 200)


def behind(rng, document, count=50):
    return np.concatenate([rng.integers(3, VOCABULARY, count), document, rng.integers(3, VOCABULARY, 10)])


def greedy_logits(llm, prompt, count):
    """Return the logits that a greedy answer is drawn from, row by row, without leaving a trace."""
    with llm.probe(prompt, count) as probe:
        rows = [probe.first_logits]
        while len(rows) < count:
            rows.append(probe.feed(len(rows) - 1, np.array([int(rows[-1].argmax())]))[0])
    return rows


def loss_of(loss, part, full, served):
    """Return the loss of a part of an answer, from logits of full prefill along it and those that it was drawn from."""
    at = 1 if part is AnswerPart.LATER else 0
    if loss == "kl:0.01":
        logs = [logits[at].double().log_softmax(-1) for logits in (full, served)]
        return min(1.0, float((logs[0].exp() * (logs[0] - logs[1])).sum()) / 0.01)
    stop = {"first": 1, "later": 4, "whole": 4}[part] if loss == "greedy:4" else at + 1
    return float(any(int(full[token].argmax()) != int(served[token].argmax()) for token in range(at, stop)))


def audited(llm, part):
    """Return how many answers had this part audited, of all classes, and the sum of its losses."""
    known = [each.parts[part] for each in llm.risk._controller.classes.values() if part in each.parts]
    return sum(each.audits for each in known), sum(each.loss_sum for each in known)


def poison(llm):
    """Make every K/V that is kept wrong: what is grafted or taken as a prefix from now on gives other answers."""
    for layer in range(llm.adapter.num_layers):
        values = llm.adapter.pool.values(layer)
        values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(1)) * 30)


class TestNotch:
    def test_without_a_calibration_nothing_is_stated_and_the_log_says_so_once(self, rng, document, caplog):
        with caplog.at_level(logging.INFO, "kvgraft"):
            llm = LLM(loaded(), **SETTINGS)
            outputs = llm.generate([document, behind(rng, document)], ANSWER)
        assert outputs[1].report.spans
        assert {output.report.risk for output in outputs} == {UNCALIBRATED}
        assert [record.getMessage() for record in caplog.records if "uncalibrated" in record.getMessage()] == [
            "risk of grafted answers: uncalibrated; 'kvgraft calibrate' measures it on your own prompts"
        ]

    @pytest.mark.parametrize(("notch", "share"), [("50 %", 0.5), ("10 %", 0.1), ("none", 0.0)])
    def test_grafts_are_served_at_the_certified_notch(self, calibrated, rng, document, notch, share):
        llm = LLM(loaded(), **calibrated(notch))
        _, output = llm.generate([document, behind(rng, document)], ANSWER)
        report = output.report
        assert report.recomputed_tokens / (report.recomputed_tokens + report.shifted_tokens) == pytest.approx(
            share, abs=0.02
        )
        assert report.risk == llm.risk.start
        assert (report.risk.status, report.risk.notch, report.risk.audits) == (RiskStatus.CALIBRATED, notch, 0)

    def test_where_none_is_certified_nothing_is_grafted(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("full"))
        prompt = behind(rng, document)
        _, output = llm.generate([document, prompt], ANSWER)
        assert output.report.miss.reason is MissReason.RISK
        assert output.token_ids == LLM(loaded(), **SETTINGS).generate(prompt, ANSWER, "off")[0].token_ids
        llm.check()

    def test_a_policy_of_the_request_s_own_is_not_meant(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("10 %"), audit_share=1.0)
        llm.generate(document, ANSWER)
        output = llm.generate(behind(rng, document), ANSWER, selection=QuerySeam(0.3))[0]
        assert output.report.spans
        assert output.report.risk == OWN_SETTINGS
        assert llm.audit() == 0

    def test_a_verified_answer_is_no_graft_s(self, calibrated, rng, document):
        """It is drafted with the configured policy, at a notch at which nothing may be grafted, and nobody audits it."""
        llm = LLM(loaded(), **calibrated("full"), audit_share=1.0)
        llm.generate(document, ANSWER)
        policy, correction = llm.policy, "drift"
        output = llm.generate(behind(rng, document), ANSWER, "verified", selection=policy, correction=correction)[0]
        assert output.report.healing.spans
        assert "verified" in output.report.risk.reason
        assert llm.audit() == 0

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("model", "0" * 32),
            ("dtype", "bfloat16"),
            ("policy", "first_k"),
            ("policy version", "2"),
            ("repair", "before"),
            ("repair_below_margin", "0.1"),
            ("repair_rows", "16"),
            ("min_run", "99"),
        ],
    )
    def test_a_calibration_of_something_else_is_refused_in_one_line(self, calibrated, tiny, name, value):
        binding = risk_binding(tiny.config, tiny.loaded, tiny.policy) | {name: value}
        with pytest.raises(ConfigError, match=rf"is of another {name} .*; run 'kvgraft calibrate'") as caught:
            LLM(loaded(), **calibrated("10 %", binding=binding))
        assert "\n" not in str(caught.value)

    def test_another_precision_or_policy_is_another_one(self, calibrated):
        settings = calibrated("10 %")
        with pytest.raises(ConfigError, match=r"is of another model|is of another dtype"):
            LLM(loaded(torch.bfloat16), **settings)
        with pytest.raises(ConfigError, match="is of another policy"):
            LLM(loaded(), **settings | {"selection": "first_k"})

    def test_weights_of_another_model_are_another_model(self, calibrated):
        other = tiny_model("llama")
        with torch.no_grad():
            next(other.parameters())[0, 0] += 1
        with pytest.raises(ConfigError, match="is of another model"):
            LLM(adopt_model("llama", other, None), **calibrated("10 %"))

    def test_a_file_of_before_the_repair_names_the_remedy(self, tmp_path):
        path = tmp_path / "calibration.json"
        path.write_text('{"kind": "kvgraft calibration", "version": 1}')
        with pytest.raises(ConfigError, match=r"file of version 1, .*; run 'kvgraft calibrate' again") as caught:
            LLM(loaded(), **SETTINGS, calibration=str(path))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"kind": "kvgraft calibration", "version": 2}'])
    def test_a_file_that_is_none_is_refused_in_one_line(self, tmp_path, text):
        path = tmp_path / "calibration.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"cannot be used .*; give a file that 'kvgraft calibrate' wrote"):
            LLM(loaded(), **SETTINGS, calibration=str(path))

    def test_a_file_that_claims_more_than_it_shows_is_refused(self, calibrated):
        settings = calibrated("10 %")
        path = settings["calibration"]
        with open(path) as file:
            text = file.read()
        with open(path, "w") as file:
            file.write(re.sub('"notch": "10 %",(?=\\s+"notches")', '"notch": "none",', text))
        with pytest.raises(ConfigError, match="its notch is not the boldest certified one"):
            LLM(loaded(), **settings)

    @pytest.mark.parametrize("setting", [{"audit_share": 0.5}, {"risk_state": "risk.json"}])
    def test_audits_need_a_calibration(self, setting):
        with pytest.raises(ConfigError, match="needs a calibration"):
            LLM(loaded(), **SETTINGS, **setting)


class TestAudit:
    @pytest.mark.parametrize("mutation", [None, ReuseMode.GRAFT])
    def test_does_not_compare_a_request_with_itself(self, calibrated, rng, document, monkeypatch, mutation):
        """Kept K/V are all wrong, so the answer is; full prefill sees it. An audit that reuses them too sees nothing."""
        if mutation:
            monkeypatch.setattr(audit, "AUDIT_REUSE", mutation)
        llm = LLM(loaded(), **calibrated("none", "greedy:4"), audit_share=1.0)
        llm.generate(document, ANSWER)
        poison(llm)
        output = llm.generate(behind(rng, document), ANSWER)[0]
        assert output.report.spans
        assert llm.audit() == 1
        for part in (AnswerPart.FIRST, AnswerPart.LATER):
            assert audited(llm, part) == (1, 0.0 if mutation else 1.0)
        (reuse_class,) = llm.risk._controller.classes
        facts = Inspection.of(llm.engine).audits
        assert {each.part for each in facts} == {"first", "later"}
        for each in facts:
            assert each.request_id == output.request_id
            assert (each.reuse_class, each.notch, each.loss_kind) == (reuse_class, "none", "greedy:4")
            assert each.loss == (0.0 if mutation else 1.0)
        llm.check()

    @pytest.mark.parametrize("repair", ["before", "after"])
    @pytest.mark.parametrize("loss", ["first_token", "greedy:4", "kl:0.01"])
    def test_losses_are_those_of_the_model_s_own_forward_pass(self, calibrated, rng, document, loss, repair):
        settings = calibrated("5 %", loss, epsilon=0.95, repair=repair)  # no breach that begins anew
        llm = LLM(loaded(), **settings, audit_share=1.0)
        llm.generate(document, ANSWER)
        parts = [AnswerPart.WHOLE] if repair == "before" else [AnswerPart.FIRST, AnswerPart.LATER]
        expected = {part: [] for part in parts}
        for count in range(20, 44):
            prompt = behind(rng, document, count)
            served = greedy_logits(llm, prompt, 4)  # before the prompt leaves donors of its own
            output = llm.generate(prompt, ANSWER)[0]
            assert list(output.token_ids) == [int(row.argmax()) for row in served]
            assert output.report.repair.from_token == (1 if repair == "before" else 2)
            with llm.adapter.stock() as model:
                full = stock_logits(model, prompt, np.asarray(output.token_ids))
            for part in parts:
                expected[part].append(loss_of(loss, part, full, served))
        assert llm.audit() == 24
        for part in parts:
            assert audited(llm, part) == (24, pytest.approx(sum(expected[part]), rel=1e-3))
        assert 0 < sum(map(sum, expected.values())) < 24 * len(parts)

    def test_an_answer_of_one_token_is_a_row_of_its_own(self, calibrated, rng, document):
        """It waits for the repair on a server that does not, and so does one that asks for that."""
        llm = LLM(loaded(), **calibrated("10 %"), audit_share=1.0)
        llm.generate(document, ANSWER)
        one = llm.generate(behind(rng, document, 20), SamplingParams(1))[0].report
        before = llm.generate(behind(rng, document, 30), ANSWER, repair="before")[0].report
        after = llm.generate(behind(rng, document, 40), ANSWER)[0].report
        assert [report.risk.part for report in (one, before, after)] == ["whole", "whole", "first"]
        assert {report.risk.status for report in (one, before, after)} == {RiskStatus.CALIBRATED}
        assert llm.audit() == 3
        assert [audited(llm, part)[0] for part in AnswerPart] == [1, 1, 2]

    def test_a_request_that_repairs_later_than_was_calibrated_is_not_meant(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("10 %", repair="before"), audit_share=1.0)
        llm.generate(document, ANSWER)
        output = llm.generate(behind(rng, document), ANSWER, repair="after")[0]
        assert output.report.repair.time is RepairTime.AFTER
        assert output.report.risk == OWN_SETTINGS
        assert llm.audit() == 0

    def test_rules_of_repair_of_the_request_s_own_are_not_meant(self, calibrated, rng, document):
        """Which first tokens wait is part of what was calibrated; one that waits in any case has a row of its own."""
        llm = LLM(loaded(), **calibrated("10 %"), audit_share=1.0)
        llm.generate(document, ANSWER)
        for rules, is_meant in (
            (RepairRules(RepairTime.AFTER), True),
            (RepairRules(RepairTime.AFTER, below_margin=0.5), False),
            (RepairRules(RepairTime.AFTER, rows_per_step=2), False),
            (RepairRules(), True),
        ):
            output = llm.generate(behind(rng, document), ANSWER, repair=rules)[0]
            assert output.report.spans
            assert (output.report.risk != OWN_SETTINGS) == is_meant, rules
            assert (llm.audit() > 0) == is_meant, rules

    def test_an_answer_that_ends_at_its_first_token_says_nothing_of_later_ones(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("10 %", "kl:1"), audit_share=1.0)
        llm.generate(document, ANSWER)
        prompt = behind(rng, document)
        first = int(greedy_logits(llm, prompt, 1)[0].argmax())
        output = llm.generate(prompt, SamplingParams(4, stop_token_ids=(first,)))[0]
        assert (len(output.token_ids), output.report.repair.from_token) == (1, None)
        assert llm.audit() == 1
        assert [audited(llm, part)[0] for part in AnswerPart] == [1, 0, 0]

    def test_a_first_token_that_breaches_waits_for_the_repair(self, calibrated, rng, document):
        """Bolder or stricter shares leave it as it is; the later tokens keep their risk."""
        llm = LLM(loaded(), **calibrated("10 %"), audit_share=1.0)
        llm.generate(document, ANSWER)
        controller = llm.risk._controller
        while controller.audit("shifted", controller.notch("shifted"), 1.0, AnswerPart.FIRST) is None:
            continue
        output = llm.generate(behind(rng, document), ANSWER)[0]
        report = output.report
        assert (report.repair.time, report.repair.from_token) == (RepairTime.BEFORE, 1)
        assert report.repair.reason == "the risk that is held leaves no first token unrepaired"
        assert (report.risk.notch, report.risk.status, report.risk.part) == (
            "50 % before",
            RiskStatus.BREACHED,
            "whole",
        )
        assert report.recomputed_tokens >= report.shifted_tokens - 1
        assert llm.audit() == 1
        assert [audited(llm, part)[0] for part in AnswerPart] == [0, 0, 1]
        llm.check()

    def test_an_answer_begun_again_after_a_breach_is_not_called_exact(self, calibrated, rng, document):
        """Its first token is out, and the class waits by now: what follows is drawn from repaired K/V, not exact ones."""
        llm = LLM(loaded(), **calibrated("10 %"), audit_share=1.0)
        llm.generate(document, ANSWER)
        engine, controller, outputs = llm.engine, llm.risk._controller, []
        engine.add(engine.builder.build(behind(rng, document), RequestOptions(ANSWER)))
        while engine.has_work:
            outputs += [event.part.output for event in engine.step() if event.part.output is not None]
            for active in list(engine.scheduler.running):
                if active.phase is Phase.REPAIR and not active.num_preemptions:
                    while controller.audit("shifted", controller.notch("shifted"), 1.0, AnswerPart.FIRST) is None:
                        continue
                    engine.scheduler.preempt(active)
        (output,) = outputs
        assert output.num_preemptions == 1
        assert (output.report.repair.from_token, output.report.repair.exact_from_token) == (2, None)
        llm.check()

    @pytest.mark.parametrize("is_held", [False, True])
    def test_donors_in_their_own_places_are_held_as_what_goes_on_is(self, calibrated, rng, document, *, is_held):
        """Shifted grafts are off. The text after one has donors of generation 1, and nothing else is left of it."""
        llm = LLM(loaded(), **calibrated("none", repair="before"), audit_share=1.0)
        llm.generate(document, ANSWER)
        prompt = np.concatenate([behind(rng, document), rng.integers(3, VOCABULARY, 100)])
        assert llm.generate(prompt, ANSWER)[0].report.shifted_tokens
        llm.audit()
        controller, space = llm.risk._controller, llm.space
        for name in ("shifted", "continued")[: 1 + is_held]:
            while controller.notch(name):
                controller.audit(name, controller.notch(name), 1.0, AnswerPart.WHOLE)
        space.release_forgotten(space.prefix.evict(4_000))
        report = llm.generate(np.concatenate([prompt, rng.integers(3, VOCABULARY, 30)]), ANSWER)[0].report
        assert (report.shifted_tokens, bool(report.continued_tokens)) == (0, not is_held)
        assert llm.audit() == (not is_held)
        if not is_held:
            assert controller.classes["continued"].parts[AnswerPart.WHOLE].audits == 1
        llm.check()

    def test_leaves_no_trace(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("none"), audit_share=1.0)
        llm.generate([document, behind(rng, document)], ANSWER)
        before = (llm.usage(), len(llm.space.donors))
        assert llm.audit() == 1
        assert (llm.usage(), len(llm.space.donors)) == before
        llm.check()

    @pytest.mark.parametrize(("repair", "next_notch"), [("before", "5 %"), ("after", "50 % before")])
    def test_a_breach_tightens_then_switches_off_and_restarts_remember(
        self, calibrated, rng, document, tmp_path, *, repair, next_notch
    ):
        settings = calibrated("none", "greedy:4", repair=repair)
        settings |= {"audit_share": 1.0, "risk_state": str(tmp_path / "risk.json")}
        llm = LLM(loaded(), **settings)
        llm.generate(document, ANSWER)
        poison(llm)
        notches = []
        for count in range(20, 34):
            output = llm.generate(behind(rng, document, count), ANSWER)[0]
            llm.audit()
            notches.append(output.report.risk.notch)
        assert notches == sorted(notches, key=["none", next_notch, "full"].index)
        assert set(notches) == {"none", next_notch, "full"}
        told = Inspection.of(llm.engine).audits
        assert [each.event for each in reversed(told) if each.event] == ["tightened", "switched_off"]
        assert sorted(each.at for each in told) == [each.at for each in reversed(told)]
        assert output.report.miss.reason is MissReason.RISK
        assert output.report.risk.status is RiskStatus.BREACHED
        again = LLM(loaded(), **settings)
        assert again.risk.statements() == llm.risk.statements()
        again.generate(document, ANSWER)
        assert again.generate(behind(rng, document), ANSWER)[0].report.miss.reason is MissReason.RISK

    def test_a_share_of_requests_is_sampled(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("none"), audit_share=0.3)
        llm.generate(document, ANSWER)
        llm.generate([behind(rng, document, 20 + count) for count in range(60)], SamplingParams(1))
        assert 8 <= llm.audit() <= 30

    def test_too_many_are_left_out_and_counted(self, calibrated, rng, document, monkeypatch):
        monkeypatch.setattr(audit, "MOST_PENDING", 3)
        llm = LLM(loaded(), **calibrated("none"), audit_share=1.0)
        llm.generate(document, ANSWER)
        llm.generate([behind(rng, document, 20 + count) for count in range(5)], ANSWER)
        assert (llm.engine.auditor.num_pending, llm.engine.auditor.num_left_out) == (3, 2)

    def test_a_reset_forgets_pending_audits_and_changed_weights_the_statement(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("none"), audit_share=1.0)
        llm.generate([document, behind(rng, document)], ANSWER)
        llm.reset()
        assert llm.audit() == 0
        assert llm.risk.start.status is RiskStatus.CALIBRATED
        with torch.no_grad():
            next(llm.loaded.model.parameters())[0, 0] += 1
        llm.reset()
        assert llm.risk.start == WITHDRAWN
        assert Inspection.of(llm.engine).audits == ()
        outputs = llm.generate([document, behind(rng, document)], ANSWER)
        assert {output.report.risk for output in outputs} == {WITHDRAWN}
        assert llm.audit() == 0

    def test_gives_its_slots_back_to_requests_that_need_them(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("none") | {"num_slots": 600}, audit_share=1.0, max_rows=64)
        llm.generate([document, behind(rng, document)], ANSWER)
        engine = llm.engine
        engine.audit_step()
        assert engine.auditor.is_running
        held = llm.usage().request
        assert held >= 260
        output = llm.generate(rng.integers(3, VOCABULARY, 500), ANSWER)[0]
        assert output.num_preemptions == 0
        assert not engine.auditor.is_running
        assert llm.audit() == 1
        assert audited(llm, AnswerPart.FIRST)[0] == 1
        llm.check()

    def test_pauses_while_requests_run_and_goes_on(self, calibrated, rng, document):
        llm = LLM(loaded(), **calibrated("none"), audit_share=1.0, max_rows=64)
        llm.generate([document, behind(rng, document)], ANSWER)
        llm.engine.audit_step()
        running = llm.engine.auditor._running
        llm.generate(rng.integers(3, VOCABULARY, 50), ANSWER)
        assert llm.engine.auditor._running is running
        assert llm.audit() == 1
        llm.check()

    def test_a_failure_is_counted_and_harms_nobody(self, calibrated, rng, document, monkeypatch):
        llm = LLM(loaded(), **calibrated("none"), audit_share=1.0)
        llm.generate([document, behind(rng, document)], ANSWER)
        with monkeypatch.context() as patch:
            patch.setattr(llm.adapter, "forward", lambda *_: 1 / 0)
            llm.audit()
        assert llm.engine.auditor.num_left_out == 1
        assert llm.risk.statements() == {}
        llm.check()
        llm.generate(document, ANSWER)

    def test_begins_again_after_its_user_has_interrupted_it(self, calibrated, rng, document, monkeypatch):
        llm = LLM(loaded(), **calibrated("10 %"), audit_share=1.0)
        llm.generate(document, ANSWER)
        llm.generate(behind(rng, document), ANSWER)
        with monkeypatch.context() as patched:
            patched.setattr(llm.adapter, "forward", self.interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.audit()
        llm.check()
        assert llm.audit() == 1
        assert llm.risk.latest
        assert not llm.engine.auditor.num_left_out
        llm.check()

    @staticmethod
    def interrupted(batch):
        raise KeyboardInterrupt

    def test_a_state_that_cannot_be_written_stops_nothing(self, calibrated, rng, document, tmp_path, caplog):
        state = tmp_path / "gone" / "risk.json"
        llm = LLM(loaded(), **calibrated("none"), audit_share=1.0, risk_state=str(state))
        llm.generate([document, behind(rng, document), behind(rng, document)], ANSWER)
        llm.audit()
        assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1
        assert audited(llm, AnswerPart.LATER)[0] == 2


def test_a_server_s_engine_audits_by_itself_and_only_while_nothing_waits(calibrated, rng, document, monkeypatch):
    busy = []
    audit_step = Engine.audit_step

    def watched(engine):
        busy.append(engine.has_work)
        audit_step(engine)

    monkeypatch.setattr(Engine, "audit_step", watched)

    async def main():
        # `heal` would hold a piece's slots whenever the snapshot looks.
        llm = AsyncLLM(loaded(), **calibrated("none", epsilon=0.95), audit_share=1.0, max_rows=64, heal="off")
        await answer(llm, document)
        await asyncio.gather(*(answer(llm, behind(rng, document, 20 + count)) for count in range(8)))
        async with asyncio.timeout(PATIENCE_S):
            while sum(parts["first"].audits for parts in llm.snapshot().class_risks.values()) < 8:
                await asyncio.sleep(0.01)
        await llm.check()
        snapshot = llm.snapshot()
        await llm.close()
        return snapshot

    snapshot = asyncio.run(main())
    assert (snapshot.num_pending_audits, snapshot.num_left_out_audits) == (0, 0)
    assert snapshot.usage.request == 0
    assert busy
    assert not any(busy)


async def answer(llm, prompt):
    request = await llm.prepare(prompt, ANSWER)
    return [part async for part in llm.stream(request)][-1].output
