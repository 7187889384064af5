"""The engine under random arrivals, cancellations and steps in a pool that is too small: conserved slots, right tokens."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.page_index import PageIndex, tree_pages
from tests.sampling_rules import RULES, assert_scored, ruled
from tests.support.drawn_time import DrawnTimeMachine
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact, assert_slots_are_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams, core
from kvgraft.engine.core import Engine
from kvgraft.engine.event_feed import EventFeed
from kvgraft.engine.model import slot_plan
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.events import EventLog
from kvgraft.prefix import EVICTION_POLICIES
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model


class Feed(EventFeed):
    """Keeps the events that steps and resets hand on, instead of sending them."""

    def __init__(self, kv_events):
        super().__init__(kv_events)
        self.log, self._handed_on = EventLog(), []

    def flush(self):
        self._handed_on += self.log.take()

    def take(self):
        events, self._handed_on = self._handed_on, []
        return events


class Answer:
    """What a client makes of the parts of a stream, provisional ones among them."""

    def __init__(self):
        self.tokens, self.outstanding, self.has_drafts = [], [], False

    def take(self, part):
        if part.num_retracted:
            del self.outstanding[-part.num_retracted :]
        if part.is_provisional:
            self.outstanding.append(part.token_id)
            self.has_drafts = True
            return
        self.outstanding = self.outstanding[1:] if self.outstanding[:1] == [part.token_id] else []
        self.tokens.append(part.token_id)


class BatchingMachine(DrawnTimeMachine):
    """Requests share documents; at most a few fit at once."""

    families: tuple[str, ...] = ("llama",)
    page_sizes, fewest_slots = (1, 16, 64), (0, 0, 0)
    window_share = 0.5

    @initialize(
        seed=st.integers(0, 2**31),
        slots=st.integers(350, 900),
        max_rows=st.sampled_from([17, 64, 4096]),
        number=st.integers(0, 2),
        page=st.integers(0, 2),
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        repair_rows=st.sampled_from([0, 0, 5, 40]),
    )
    def start(self, seed, slots, max_rows, number, page, policy, repair_rows):  # noqa: PLR0917 - hypothesis passes by keyword
        torch.manual_seed(0)
        self.rng = np.random.default_rng(seed)
        self.draw_time(seed)
        config = EngineConfig(
            repair_below_margin=0,
            num_slots=max(slots, self.fewest_slots[page]),
            host_bytes=1_000_000,
            donor_tokens=1 << 13,
            max_rows=max_rows,
            max_running=6,
            max_waiting=20,
            page_size=self.page_sizes[page],
            eviction_policy=policy,
            repair_rows=repair_rows,
        )
        family = self.families[number % len(self.families)]
        self.index, self.feed = PageIndex(), Feed("")
        with (
            mock.patch.object(slot_plan, "_MAX_WINDOW_SHARE", self.window_share),
            mock.patch.object(core, "EventFeed", return_value=self.feed),
        ):
            self.engine = Engine(adopt_model(family, tiny_model(family), None), config, max_step_s=0.01)
        self.documents = [self.rng.integers(3, VOCABULARY, int(self.rng.integers(80, 120))) for _ in range(3)]
        self.open = {}
        self.texts = []
        self.prompts = []
        self.read_documents()
        for selection in (
            "query_seam",
            "first_k",
        ):  # there is something to disturb, whatever rules hypothesis leaves out
            self.ask(self.quoting([0, 1], 9), SamplingParams(6, ignore_eos=True), "graft", selection=selection)

    def read_documents(self):
        """Prompts that quote them are grafted from now on."""
        for document in self.documents:
            self.ask(document, SamplingParams(1, ignore_eos=True), "graft")
        names = list(self.open)[-len(self.documents) :]
        while self.open.keys() & set(names):
            self.step(1)

    def quoting(self, chosen, new):
        parts = [self.rng.integers(3, VOCABULARY, new), *(self.documents[i] for i in chosen)]
        return np.concatenate(parts)[:260]

    @rule(
        chosen=st.lists(st.integers(0, 2), min_size=1, max_size=2),
        new=st.integers(1, 20),
        length=st.integers(1, 60),
        reuse=st.sampled_from(["off", "exact", "graft", "graft", "verified"]),
        shown=st.booleans(),
        salt=st.sampled_from(["", "", "", "x"]),
        selection=st.sampled_from(["none", "first_k", "query_seam", "random", "kv_deviation", "adaptive"]),
        correction=st.sampled_from(["none", "drift"]),
        priority=st.integers(-1, 1),
        rules=RULES,
        steps=st.integers(0, 8),
    )
    def add(self, chosen, new, length, reuse, shown, salt, selection, correction, priority, rules, steps):  # noqa: PLR0917
        """Take a request and run some steps: one rule, because hypothesis leaves rules out of whole examples."""
        self.ask(
            self.quoting(chosen, new),
            SamplingParams(length, ignore_eos=True, **rules),
            reuse,
            provisional=shown and reuse == "verified",
            cache_salt=salt,
            selection=selection,
            correction=correction,
            priority=priority,
        )
        self.step(steps)

    def ask(self, prompt, sampling, reuse, *, provisional=False, **options):
        if len(self.open) >= 15:
            return
        request = self.engine.builder.build(prompt, RequestOptions(sampling, reuse, **options))
        request = replace(request, provisional=provisional)
        self.submit(request)
        self.open[request.request_id] = (request, Answer())
        self.prompts.append(request.token_ids.astype(np.int64))

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            for event in self.engine.step():
                assert event.error is None
                request, answer = self.open[event.request_id]
                answer.take(event.part)
                assert request.provisional or not answer.has_drafts
                if event.part.output is not None:
                    self.finished(request, answer.tokens, event.part.output)
                    del self.open[event.request_id]

    def finished(self, request, tokens, output):
        assert output.token_ids == tuple(tokens)
        assert len(tokens) == request.sampling.max_new_tokens
        self.texts.append(np.concatenate([request.token_ids, tokens[:-1]]).astype(np.int64))
        if request.sampling.prompt_logprobs is not None:
            assert_scored(self.engine.adapter, output, request.sampling.prompt_logprobs)
        report = output.report
        assert report.num_tokens == len(request.token_ids) == report.reused_tokens + report.computed_tokens
        if request.reuse == "off":
            assert report.reused_tokens == 0
        if request.reuse == "verified":
            assert report.reused_tokens == report.exact_tokens
        if report.shifted_tokens == 0 and report.recomputed_tokens == 0:
            self.assert_greedy(request, tokens)

    @torch.inference_mode()
    def assert_greedy(self, request, tokens):
        prompt = request.token_ids
        ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
        with self.engine.adapter.stock() as model:
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits = ruled(request.sampling, prompt, tokens, logits)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((logits.max(dim=1).values - chosen).max()) < 1e-4

    @rule(index=st.integers(0, 14), kind=st.sampled_from(["cancel", "cancel", "preempt", "preempt", "forget"]))
    def disturb(self, index, kind):
        """Cancel a request, take the slots of one that runs, or forget everything that is cached."""
        running = self.engine.scheduler.running
        if kind == "cancel" and index < len(self.open):
            name = list(self.open)[index]
            assert self.engine.cancel(name)
            assert not self.engine.cancel(name)
            del self.open[name]
        elif kind == "preempt" and index < len(running):
            self.engine.scheduler.preempt(running[index])
        elif kind == "forget":
            self.engine.reset()
            self.read_documents()

    @rule()
    def run_dry(self):
        steps = 0
        while self.engine.has_work:
            self.step(1)
            steps += 1
            assert steps < 5_000
        assert not self.open
        assert self.engine.space.usage().request == 0
        self.nothing_runs()
        self.what_is_kept_is_exact()

    def what_is_kept_is_exact(self):
        """Stored prefixes and donors of generation 0 are what the model computes, whatever happened on the way."""
        adapter, space = self.engine.adapter, self.engine.space
        for text in self.texts[-3:]:
            for salt in ("", "x"):
                namespace = self.engine.builder.build(text[:1], RequestOptions(cache_salt=salt)).namespace
                assert_prefix_is_exact(adapter, space, namespace, text)
        assert_donors_are_exact(adapter, space, [*self.prompts, *self.texts], last=6)

    def nothing_runs(self):
        pass

    @rule()
    def look_at_frontiers(self):
        """What is in front of a frontier is what the model computes, while drafts attend to what is behind it."""
        for active in self.engine.scheduler.running:
            drafts = active.drafts
            if drafts is not None:
                assert active.kv.plan.prefix_len <= drafts.frontier <= active.num_tokens
                assert active.kv.lineage.exact_len(drafts.frontier) == drafts.frontier
                if self.engine.space.window_usage() is None and active.kv.epoch == self.engine.space.epoch:
                    assert_slots_are_exact(self.engine.adapter, active.kv.kv_indices, drafts.exact_token_ids)

    @invariant()
    def holds(self):
        if not hasattr(self, "engine"):
            return
        self.engine.space.check()
        assert self.engine.manager.num_errors == 0
        self.feed.flush()
        self.index.read(self.feed.take())
        assert self.index.pages == tree_pages(self.engine.space.prefix), "readers of events know what is stored"
        scheduler = self.engine.scheduler
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.open)
        assert len(scheduler.running) <= 6
        held = sum(len(active.kv.kv_indices) for active in scheduler.running)
        assert self.engine.space.usage().request <= held
        assert all(not self.engine.space.donors.is_pinned(donor.donor_id) for donor in self.engine.space.donors)
        self.windows_hold(scheduler.running)

    def windows_hold(self, running):
        pass


class HybridMachine(BatchingMachine):
    """The same on models with windows; `check` counts the slots of both spaces after every step."""

    families = ("gemma2", "mistral", "cohere2")
    page_sizes, fewest_slots = (1, 8, 16), (0, 0, 180)  # of fewer there would be one space

    def nothing_runs(self):
        assert self.engine.space.window_usage().request == 0

    def windows_hold(self, running):
        rows = [active.kv.windows for active in running]
        assert self.engine.space.window_usage().request <= sum(row.stop - row.start for row in rows)
        for row in rows:
            assert (row.swa_indices[: row.start] == -1).all()
            assert (row.swa_indices[row.start : row.stop] >= 0).all()
            assert (row.swa_indices[row.stop :] == -1).all()


class FewWindowsMachine(HybridMachine):
    """Window slots for one request, wanted by six."""

    window_share = 0.01


BatchingMachine.TestCase.settings = settings(max_examples=3, stateful_step_count=25, deadline=None)
HybridMachine.TestCase.settings = FewWindowsMachine.TestCase.settings = BatchingMachine.TestCase.settings
TestBatching = BatchingMachine.TestCase
TestHybridBatching = HybridMachine.TestCase
TestFewWindows = FewWindowsMachine.TestCase
