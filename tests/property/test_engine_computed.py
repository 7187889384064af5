"""No pass of the engine reads K/V that nobody has computed: slots hold poison from the moment they are given out or back.

What could go wrong is told by vLLM, which hands blocks out as exact hits that another request computes in the same step. Here
requests with one new beginning arrive together, prompts are computed in pieces while others begin like them, some are
preempted or cancelled between two pieces, K/V are grafted, repaired, healed, loaded back from the host. Whatever attends to
poison is poisoned: the row's output, its K/V in all later layers, and all that attends to those.

Documents are long enough to be worth a graft, under policies that look at the query, too.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import torch
from hypothesis import event as note
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.engine_runs import submit
from tests.support.drawn_time import DrawnTimeMachine
from tests.support.failing_policies import Failing
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact
from tests.support.repaired_kv import RepairedKV
from tests.support.states import ColdRuns

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model import slot_plan
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.schedule.active import Phase
from kvgraft.memory import HybridSlotPool
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

POISON = float("nan")
"""Of values. Norms would make a large number plausible again."""

_DAMPED = {"rms_norm_eps": 1e-3, "num_experts_per_tok": 4}
WELL_CONDITIONED = {"qwen3_next": _DAMPED, "granitemoehybrid": _DAMPED}
"""A gated norm divides the output of a head by its size; of one token in many thousands it is so small that rounding shows in
K/V as a fault would, up to 3 %. So it does where two experts are as good as equal. Here the norm is damped, and all experts
count."""


class PoisonedSlots:
    """Poisons slots of an allocator over pools, and sees to it that no forward pass shows any of it."""

    def __init__(self, engine):
        self.adapter, space = engine.adapter, engine.space
        pool = engine.adapter.pool
        if not isinstance(pool, HybridSlotPool):
            self.watch(space.allocator, partial(self.poison, pool))
        else:
            self.watch(space.layers.allocator, partial(self.poison, pool.window))
            if pool.full is not None:
                self.watch(space.allocator, partial(self.poison, pool.full))
        if self.adapter.states is not None:
            self.watch(space.layers.allocator, self.poison_states)
        self.forward, self.adapter.forward = self.adapter.forward, self.checked

    def watch(self, allocator, poison):
        allocate, release = allocator.allocate, allocator.release

        def allocated(num_tokens, *, after=None):
            slots = allocate(num_tokens, after=after)
            poison(slots)
            return slots

        def released(slots, owner):
            freed = release(slots, owner)
            poison(freed)
            return freed

        allocator.allocate, allocator.release = allocated, released
        poison(np.arange(allocator.num_slots))

    @staticmethod
    def poison(pool, slots):
        if len(slots):
            index = torch.from_numpy(np.array(slots))
            for layer in range(len(pool.layers)):
                pool.keys(layer)[index] = 0.0
                pool.values(layer)[index] = POISON

    def poison_states(self, states):
        """A state that is neither cleared nor copied has read nothing that anybody knows."""
        pool, index = self.adapter.states, torch.from_numpy(np.array(states))
        for number, part in enumerate(pool.parts if len(states) else ()):
            pool.scatter(number, index, torch.full((len(states), *part.shape), POISON, dtype=part.dtype))

    def checked(self, batch):
        outputs = self.forward(batch)
        for rows, output in zip(batch, outputs, strict=True):
            assert torch.isfinite(output.logits).all()
            if rows.deviation_layer:
                continue  # a look ends in front of a layer, whose K/V and those behind it are not computed
            swa = None if rows.swa_indices is None else rows.swa_indices[rows.positions]
            place = self.adapter.pool.place(rows.kv_indices[rows.positions], swa)
            for layer in range(self.adapter.num_layers):
                for written in place.read(layer):
                    assert torch.isfinite(written).all()
            if rows.state is not None:
                assert all(torch.isfinite(part).all() for part in self.adapter.states.export(rows.state).parts)
        return outputs


class ComputedMachine(DrawnTimeMachine):
    """Texts are made of a few beginnings and documents, and pieces of prompts are small."""

    families: tuple[str, ...] = ("llama",)

    @initialize(
        seed=st.integers(0, 2**31),
        family=st.integers(0, 2),
        slots=st.integers(500, 1_200),
        max_rows=st.sampled_from([24, 64, 4096]),
        page_size=st.sampled_from([1, 16]),
        host_tokens=st.sampled_from([0, 100, 2_000]),
        host_bytes=st.sampled_from([300_000, 2_000_000, 2_000_000]),
        heal=st.sampled_from(["idle", "always"]),
        side_by_side=st.booleans(),
        repair_rows=st.sampled_from([0, 5, 40]),
        tokens_per_state=st.sampled_from([16, 1 << 20]),
    )
    def start(  # noqa: PLR0917
        self,
        seed,
        family,
        slots,
        max_rows,
        page_size,
        host_tokens,
        host_bytes,
        heal,
        side_by_side,
        repair_rows,
        tokens_per_state,
    ):
        torch.manual_seed(0)
        self.rng = np.random.default_rng(seed)
        self.draw_time(seed)
        config = EngineConfig(
            repair_below_margin=0,
            num_slots=slots,
            host_bytes=host_bytes,
            donor_tokens=1 << 13,
            prefix_host_bytes=host_tokens * 1_024 if self.families == ("llama",) else 0,
            max_rows=max_rows,
            max_running=6,
            page_size=page_size,
            heal=heal,
            repair_rows=repair_rows,
        )
        name = self.families[family % len(self.families)]
        # Where there are few states, requests wait for them, and recorded ones leave.
        with mock.patch.object(slot_plan, "_TOKENS_PER_STATE", tokens_per_state):
            self.engine = Engine(adopt_model(name, self.model(name), None), config, max_step_s=0.01)
        if side_by_side:  # several prompts are computed at once, however short they are
            self.engine.scheduler._is_long = lambda active: True
        poisoned = PoisonedSlots(self.engine)
        self.repaired = RepairedKV(self.engine, poisoned.forward) if self.families == ("llama",) else None
        self.beginnings = [self.words(40)]
        self.documents = [self.words(int(self.rng.integers(90, 130))) for _ in range(3)]
        self.failing = {"fails at its choice": Failing(0), "fails after its choice": Failing(1)}
        self.texts, self.open = [], {}
        self.read_documents()
        for selection in ("query_seam", *self.failing):  # whatever rules hypothesis leaves out
            self.burst(20, [0, 1], ["graft"], (selection, "after"), 6, 2)

    def read_documents(self):
        """Prompts that quote them are grafted from now on."""
        for document in self.documents:
            self.ask([document], "graft", ("none", "after"), 1)
        names = list(self.open)[-len(self.documents) :]
        while self.open.keys() & set(names):
            self.step(1)

    @staticmethod
    def model(name):
        return tiny_model(name)

    def words(self, count):
        return self.rng.integers(3, VOCABULARY, count)

    def ask(self, parts, mode, policy, count):
        if len(self.open) < 12:
            selection, repair = policy
            prompt = np.concatenate([*parts, self.words(int(self.rng.integers(1, 25)))])[:320]
            request = self.engine.builder.build(
                prompt,
                RequestOptions(
                    SamplingParams(count, ignore_eos=True),
                    mode,
                    selection=self.failing.get(selection, selection),
                    repair=repair,
                ),
            )
            self.submit(request)
            self.open[request.request_id] = request
            self.texts.append(request.token_ids.astype(np.int64))

    modes = st.sampled_from(["off", "exact", "graft", "graft", "graft", "verified"])
    policies = st.tuples(
        st.sampled_from(
            [
                "none",
                "first_k",
                "query_seam",
                "query_seam",
                "kv_deviation",
                "adaptive",
                "fails at its choice",
                "fails after its choice",
            ]
        ),
        st.sampled_from(["before", "after", "after"]),
    )
    chosen = st.lists(st.integers(0, 2), min_size=1, max_size=2) | st.lists(st.integers(0, 2), max_size=1)

    @rule(
        length=st.integers(8, 60),
        documents=chosen,
        modes=st.lists(modes, min_size=2, max_size=5),
        policy=policies,
        count=st.integers(1, 20),
        steps=st.integers(0, 8),
    )
    def burst(self, length, documents, modes, policy, count, steps):  # noqa: PLR0917
        """Requests with a beginning that nobody has computed, and steps: hypothesis leaves rules out of whole examples."""
        self.beginnings.append(self.words(length))
        for mode in modes:
            parts = [self.documents[number] for number in documents]
            self.ask([self.beginnings[-1], *parts], mode, policy, count)
        self.step(steps)

    @rule(
        number=st.integers(0, 3),
        documents=chosen,
        mode=modes,
        policy=policies,
        count=st.integers(1, 20),
        steps=st.integers(0, 8),
    )
    def follow(self, number, documents, mode, policy, count, steps):  # noqa: PLR0917
        """A request that begins like one of the last, which may be computed just now."""
        parts = [self.documents[document] for document in documents]
        self.ask([self.beginnings[-1 - number % len(self.beginnings)], *parts], mode, policy, count)
        self.step(steps)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            for event in self.engine.step():
                assert event.error is None
                if event.part.output is not None:
                    request = self.open.pop(event.request_id)
                    answer = np.asarray(event.part.output.token_ids[:-1], np.int64)
                    self.texts.append(np.concatenate([request.token_ids, answer]))
            if self.repaired is not None:
                self.repaired.look()

    @rule(
        index=st.integers(0, 11),
        kind=st.sampled_from(["cancel", "preempt", "preempt in a repair", "cancel in a repair", "heal", "forget"]),
    )
    def disturb(self, index, kind):
        """Cancel a request, take the slots of one that runs, heal some pieces, or forget everything that is cached."""
        running = self.engine.scheduler.running
        if kind.endswith("in a repair"):
            running = [active for active in running if active.phase is Phase.REPAIR]
        if kind == "cancel" and index < len(self.open):
            self.cancel(list(self.open)[index])
        elif kind == "cancel in a repair" and running:
            self.cancel(running[index % len(running)].request.request_id)
        elif kind.startswith("preempt") and running:
            self.engine.scheduler.preempt(running[index % len(running)])
        elif kind == "heal":
            for _ in range(index):
                self.engine.heal_step()
        elif kind == "forget":
            self.engine.reset()
            self.read_documents()

    def cancel(self, name):
        self.engine.cancel(name)
        del self.open[name]

    @rule()
    def run_dry(self):
        for _ in range(5_000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.open
        self.assert_exact(self.engine.builder.build(self.documents[0]).namespace)

    def assert_exact(self, namespace):
        engine = self.engine
        for text in self.texts[-8:]:
            assert_prefix_is_exact(engine.adapter, engine.space, namespace, text)
        assert_donors_are_exact(engine.adapter, engine.space, self.texts, last=8)

    @invariant()
    def holds(self):
        if hasattr(self, "engine"):
            self.engine.check()
            assert self.engine.manager.num_errors == sum(policy.num_failures for policy in self.failing.values())
            assert not self.engine.healer.dropped["error"]


class HybridComputedMachine(ComputedMachine):
    """The same on models whose window layers have slots of their own."""

    families = ("gemma2", "mistral", "cohere2")


class StateComputedMachine(ComputedMachine):
    """The same on models with layers that keep a state; a state that is stored is that of a cold run."""

    families = ("qwen3_next", "granitemoehybrid", "lfm2")
    cold = None

    @staticmethod
    def model(name):
        return tiny_model(name, **WELL_CONDITIONED.get(name, {}))

    def assert_exact(self, namespace):
        engine = self.engine
        self.cold = self.cold or ColdRuns(engine.adapter.model, 384)
        found = [
            self.cold.assert_prefix_is_exact(engine.adapter, engine.space, namespace, text) for text in self.texts[-4:]
        ]
        note(f"stored of {sum(length > 0 for length in found)} texts")
        assert not len(engine.space.donors)


ComputedMachine.TestCase.settings = settings(max_examples=4, stateful_step_count=18, deadline=None)
HybridComputedMachine.TestCase.settings = settings(max_examples=3, stateful_step_count=18, deadline=None)
StateComputedMachine.TestCase.settings = settings(max_examples=3, stateful_step_count=18, deadline=None)
TestComputed = ComputedMachine.TestCase
TestHybridComputed = HybridComputedMachine.TestCase
TestStateComputed = StateComputedMachine.TestCase


def test_a_prefix_that_is_published_before_it_is_computed_is_seen(rng, monkeypatch):
    """The oracle fails for an engine that does as vLLM does."""
    config = EngineConfig(num_slots=600, max_rows=64, repair_below_margin=0)
    engine = Engine(adopt_model("llama", tiny_model("llama"), None), config, max_step_s=0.01)
    PoisonedSlots(engine)
    graft = engine.manager.graft

    def published_early(kv):
        graft(kv)
        engine.manager._publish_prefix(kv, kv.request.token_ids)

    monkeypatch.setattr(engine.manager, "graft", published_early)
    prompt = rng.integers(3, VOCABULARY, 100)
    cancelled = submit(engine, prompt, 2, "exact")
    engine.step()  # 64 of its rows
    engine.cancel(cancelled.request.request_id)
    submit(engine, prompt, 2, "exact")
    assert [event.error is None for event in engine.step()] == [False]
