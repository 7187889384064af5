"""The origin of every position, against an oracle that keeps one entry per position."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgraft.errors import CorruptCacheError
from kvgraft.reuse.lineage import Lineage, computed_runs
from kvgraft.reuse.report import request_report
from kvgraft.types import DonorId, Fidelity, SpanReport


def span(start, length, generation=0, fidelity=Fidelity.SHIFTED):
    return SpanReport(start, length, DonorId(1), 0, start, fidelity, generation)


def report(lineage, num_tokens=100):
    return request_report(lineage, num_tokens, policy="p", timings_ms={}, miss=None)


def test_everything_is_exact_without_a_copy():
    lineage = Lineage(30)
    assert lineage.exact_len(100) == 100
    assert list(lineage.computed_runs(30, 100)) == [(30, 100, 0)]


def test_what_stands_behind_a_copy_is_one_generation_further():
    lineage = Lineage(10)
    lineage.copy([span(20, 10, generation=1), span(40, 10, generation=0)])
    assert lineage.exact_len(100) == 20
    assert list(lineage.computed_runs(10, 100)) == [(10, 20, 0), (30, 40, 2), (50, 100, 2)]


def test_exact_prefix_that_lost_its_window_exposes_what_follows():
    lineage = Lineage(32)
    lineage.expose(32, generation=0)
    lineage.copy([span(50, 10)])
    assert lineage.exact_len(100) == 32
    assert list(lineage.computed_runs(32, 100)) == [(32, 50, 1), (60, 100, 1)]


def test_nothing_behind_another_text_s_kv_becomes_a_donor():
    lineage = Lineage(0)
    lineage.copy([span(20, 10), span(40, 10, fidelity=Fidelity.SUBSTITUTED)])
    assert list(lineage.computed_runs(0, 100)) == [(0, 20, 0), (30, 40, 1)]


def test_own_blocks_given_back_after_a_preemption_stay_approximate():
    """An engine's cache takes a request's private blocks for a hit; they are what they were."""
    lineage = Lineage(64)
    lineage.copy([span(64, 256)])
    before = report(lineage, 400)
    lineage.restart(320)
    assert lineage.exact_len(400) == 64
    assert list(lineage.computed_runs(320, 400)) == [(320, 400, 1)]
    after = report(lineage, 400)
    assert (after.exact_tokens, after.shifted_tokens, after.spans) == (64, 256, before.spans)


def test_preemption_that_keeps_half_a_span_cuts_it():
    lineage = Lineage(16)
    lineage.copy([span(20, 10, generation=2), span(40, 20)])
    lineage.recompute([(20, 1), (44, 2)])
    lineage.check()
    lineage.restart(25)
    assert [(kept.target_start, kept.length) for kept in lineage.spans] == [(20, 5)]
    assert lineage.recomputed == 0
    assert list(lineage.computed_runs(25, 50)) == [(25, 50, 3)]
    lineage.check()


def test_own_computed_text_given_back_is_not_counted_as_a_hit():
    lineage = Lineage(16)
    lineage.restart(96)
    assert report(lineage).exact_tokens == 16


def test_failed_copy_leaves_exact_text():
    lineage = Lineage(0)
    lineage.copy([span(0, 20), span(40, 20)])
    lineage.withdraw(40)
    assert list(lineage.computed_runs(0, 100)) == [(20, 100, 1)]
    lineage.withdraw()
    assert not lineage.is_approximate
    assert lineage.exact_len(100) == 100


@pytest.mark.parametrize(
    ("runs", "in_gap", "told_runs", "shifted", "computed"),
    [
        ([(20, 4), (39, 1)], 0, ((20, 4), (39, 1)), 15, 75),
        ([], 5, (), 20, 70),
        ([(20, 4)], 1, (), 16, 74),  # where not all are known by position, none are told
    ],
)
def test_recomputed_tokens_leave_their_span_or_lie_beside_it(runs, in_gap, told_runs, shifted, computed):
    lineage = Lineage(10)
    lineage.copy([span(20, 20)])
    lineage.recompute(runs)
    lineage.recompute_gap(in_gap)
    lineage.check()
    told = report(lineage)
    assert (told.shifted_tokens, told.recomputed_tokens, told.computed_tokens) == (shifted, 5, computed)
    assert told.recomputed_runs == told_runs
    assert told.exact_tokens + told.shifted_tokens + told.computed_tokens == told.num_tokens


@pytest.mark.parametrize("runs", [[(19, 2)], [(39, 2)], [(20, 0)], [(25, 2), (26, 1)], [(60, 1)]])
def test_check_finds_tokens_computed_over_nothing_that_is_approximate(runs):
    lineage = Lineage(10)
    lineage.copy([span(20, 20), span(60, 5, fidelity=Fidelity.EXACT)])
    lineage.recompute(runs)
    with pytest.raises(CorruptCacheError, match="cannot have been computed"):
        lineage.check()


def test_a_run_may_go_on_from_one_span_into_the_next():
    lineage = Lineage(10)
    lineage.copy([span(20, 20), span(40, 20)])
    lineage.recompute([(38, 4)])
    lineage.check()
    assert report(lineage).recomputed_runs == ((38, 4),)


@pytest.mark.parametrize("spans", [[span(5, 10)], [span(20, 10), span(25, 10)], [span(20, 0)]])
def test_check_finds_spans_that_overlap(spans):
    lineage = Lineage(10)
    lineage.copy(spans)
    with pytest.raises(CorruptCacheError):
        lineage.check()


def test_what_is_computed_again_in_order_is_exact_up_to_the_frontier():
    lineage = Lineage(10)
    lineage.copy([span(20, 30, generation=2)])
    lineage.heal(40)
    assert lineage.exact_len(100) == 40
    assert lineage.is_approximate, "what lies behind the frontier attended to copies"
    assert list(lineage.computed_runs(10, 100)) == [(10, 20, 0), (50, 100, 3)]
    lineage.heal(60)
    assert lineage.exact_len(100) == 60, "behind the last copy, too, only what was computed again is exact"
    lineage.healed()
    assert not lineage.is_approximate
    assert lineage.exact_len(100) == 100
    assert list(lineage.computed_runs(10, 100)) == [(10, 100, 0)]


def test_a_frontier_goes_back_with_what_is_taken_away():
    lineage = Lineage(0)
    lineage.copy([span(10, 30)])
    lineage.heal(35)
    lineage.restart(25)
    lineage.copy([span(30, 10)])
    assert lineage.exact_len(100) == 25


def test_empty_source_raises_the_generation_of_what_follows():
    assert list(computed_runs([(5, 5, 1)], 0, 10)) == [(0, 5, 0), (5, 10, 1)]


def test_turns_add_no_generation_and_copies_do():
    """A conversation goes on a hundred turns after one graft, and then copies text of its own generation once more."""
    lineage = Lineage(0)
    lineage.copy([span(20, 30, generation=0)])
    for turn in range(1, 101):
        generation = lineage.generation_at(100 * turn)
        lineage = Lineage(20)
        lineage.go_on(100 * turn, generation)
    assert list(lineage.computed_runs(20, 10_100)) == [(10_000, 10_100, 1)]
    lineage.copy([span(10_050, 20, generation=1)])
    assert list(lineage.computed_runs(20, 10_100)) == [(10_000, 10_050, 1), (10_070, 10_100, 2)]
    assert lineage.exact_len(10_100) == 20


def test_what_a_request_goes_on_from_is_a_class_of_its_own_and_sums_add_up():
    lineage = Lineage(10)
    lineage.go_on(50, generation=1)
    lineage.check()
    told = report(lineage)
    assert (told.exact_tokens, told.continued_tokens, told.computed_tokens) == (10, 40, 50)
    assert (told.policy, told.num_donors) == ("none", 0)
    assert told.miss is not None, "nothing was grafted"
    assert [(part.target_start, part.length, part.fidelity) for part in told.spans] == [(10, 40, Fidelity.CONTINUED)]
    lineage.copy([span(60, 20)])
    lineage.recompute([(60, 2)])
    told = report(lineage)
    assert (told.continued_tokens, told.shifted_tokens, told.recomputed_tokens, told.computed_tokens) == (40, 18, 2, 32)
    assert told.exact_tokens + told.continued_tokens + told.shifted_tokens + told.computed_tokens == told.num_tokens
    assert told.policy == "p"
    assert told.miss is None


def test_all_after_a_copy_may_be_computed_again_but_never_what_is_exact():
    """Where a policy failed, what stands in its own place is computed, too, and counts as that."""
    lineage = Lineage(10)
    in_place = span(50, 10, fidelity=Fidelity.CONTINUED, generation=1)
    lineage.copy([span(20, 10), in_place, span(70, 10, fidelity=Fidelity.EXACT)])
    lineage.recompute([(20, 10), (50, 10)])
    lineage.check()
    assert [lineage.copied_tokens(kind) for kind in Fidelity] == [
        10 if kind is Fidelity.EXACT else 0 for kind in Fidelity
    ]
    lineage.recompute([(70, 4)])
    with pytest.raises(CorruptCacheError, match="cannot have been computed"):
        lineage.check()


def test_a_failed_copy_leaves_what_the_request_goes_on_from_approximate():
    lineage = Lineage(10)
    lineage.go_on(50, generation=2)
    lineage.copy([span(60, 20)])
    lineage.withdraw(50)
    assert not lineage.has_copies
    assert lineage.is_approximate
    assert lineage.exact_len(100) == 10
    assert list(lineage.computed_runs(10, 100)) == [(50, 100, 2)]


def test_nobody_goes_on_from_another_texts_kv():
    lineage = Lineage(0)
    lineage.copy([span(20, 10), span(40, 10, fidelity=Fidelity.SUBSTITUTED)])
    assert (lineage.own_len(100), lineage.generation_at(40)) == (40, 1)


class LineageMachine(RuleBasedStateMachine):
    """An oracle with one `(kind, generation)` per position: what was given, copied from whom, computed behind what."""

    @initialize(prefix_len=st.integers(0, 12), continued=st.integers(0, 8), generation=st.integers(1, 3))
    def admit(self, prefix_len, continued, generation):
        self.lineage = Lineage(prefix_len)
        self.lineage.go_on(prefix_len + continued, generation)
        self.positions = [("given", 0)] * prefix_len + [("continued", generation)] * continued
        self.healed_len = 0
        self.exposures = []
        self.again = []

    def attended(self):
        copied = [1 + generation for kind, generation in self.positions if kind == "copied"]
        gone_on = [generation for kind, generation in self.positions if kind == "continued"]
        return max([*copied, *gone_on, *(1 + generation for _, generation in self.exposures)], default=0)

    @rule(generation=st.integers(0, 3))
    def expose(self, generation):
        self.lineage.expose(len(self.positions), generation)
        self.exposures.append((len(self.positions), generation))

    @rule(count=st.integers(1, 8))
    def compute(self, count):
        self.positions += [("computed", self.attended())] * count

    @rule(length=st.integers(1, 8), generation=st.integers(0, 3))
    def copy(self, length, generation):
        self.lineage.copy([span(len(self.positions), length, generation)])
        self.positions += [("copied", generation)] * length

    @rule(data=st.data())
    def compute_copies_again(self, data):
        behind = max(self.again, default=-1)
        copied = [p for p, (kind, _) in enumerate(self.positions) if kind == "copied" and p > behind]
        chosen = sorted(data.draw(st.sets(st.sampled_from(copied)))) if copied else []
        self.lineage.recompute([(p, 1) for p in chosen])
        self.again += chosen

    @rule(share=st.floats(0, 1))
    def heal(self, share):
        """A prefix of everything is computed again; the oracle calls it computed behind nothing copied."""
        stop = int(share * len(self.positions))
        self.lineage.heal(stop)
        self.healed_len = max(self.healed_len, stop)

    @precondition(lambda self: self.lineage.spans)
    @rule()
    def copy_fails_and_is_computed(self):
        last = self.lineage.spans[-1]
        self.lineage.withdraw(last.target_start)
        del self.positions[last.target_start :]
        self.again = []
        self.exposures = [(p, g) for p, g in self.exposures if p < last.target_start]
        self.healed_len = min(self.healed_len, last.target_start)
        self.positions += [("computed", self.attended())] * last.length

    @rule(share=st.floats(0, 1))
    def preempt(self, share):
        before = report(self.lineage, len(self.positions)) if self.positions else None
        kept = int(share * len(self.positions))
        self.lineage.restart(kept)
        self.healed_len = min(self.healed_len, kept)
        if any(kind == "copied" for kind, _ in self.positions[kept:]):
            self.again = []
        del self.positions[kept:]
        self.exposures = [(p, g) for p, g in self.exposures if p < kept]
        if before is not None and kept:
            after = report(self.lineage, kept)
            assert after.exact_tokens <= before.exact_tokens
            assert set(after.spans[:-1]) <= set(before.spans)

    @invariant()
    def nothing_approximate_may_be_published(self):
        exact = self.lineage.exact_len(len(self.positions))
        kept = self.positions[self.healed_len : exact]
        assert all(kind not in ("copied", "continued") and generation == 0 for kind, generation in kept)
        assert exact >= self.healed_len
        if self.healed_len < exact < len(self.positions):
            is_approximate = self.positions[exact][0] in ("copied", "continued")
            assert is_approximate or exact in [p for p, _ in self.exposures]

    @invariant()
    def donors_are_computed_and_of_their_generation(self):
        start = self.lineage.prefix_len
        runs = list(self.lineage.computed_runs(start, len(self.positions)))
        expected = {p: g for p, (kind, g) in enumerate(self.positions) if kind == "computed" and p >= start}
        assert {p: run.generation for run in runs for p in range(run.start, run.stop)} == expected

    @invariant()
    def report_counts_every_token_once(self):
        told = report(self.lineage, len(self.positions))
        kinds = [kind for kind, _ in self.positions]
        assert told.shifted_tokens == kinds.count("copied") - len(self.again)
        assert told.recomputed_runs == tuple((p, 1) for p in self.again)
        assert told.continued_tokens == kinds.count("continued")
        reused = told.exact_tokens + told.continued_tokens + told.shifted_tokens
        assert reused + told.computed_tokens == len(self.positions)
        self.lineage.check()


TestLineageMachine = LineageMachine.TestCase
TestLineageMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
