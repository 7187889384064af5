"""Verified answers under random steps, cancellations, preemption and resets: always full prefill's, and nothing else is kept.

The oracle is an engine that reuses nothing. Whatever reports no approximate K/V must answer as it does; what is stored as
exact must be what the model computes, also while requests draft beside it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import numpy as np
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.sampling_rules import RULES, ruled
from tests.support.drawn_time import DrawnTimeMachine
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model import slot_plan
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

TIE = 1e-4
"""Logits that are as near as that are equal up to rounding, and either token is the largest."""


def model(family):
    """One of its own per engine, always with the same weights.

    They are larger than random weights are, so that what a token attends to decides what follows.
    """
    made = tiny_model(family)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return made


@cache
def oracle(family):
    """An engine that is asked without reuse only, one request at a time."""
    config = EngineConfig(num_slots=600, host_bytes=0, donor_tokens=1 << 14)
    return Engine(adopt_model(family, model(family), None), config)


@cache
def full_prefill(family, prompt, sampling):
    """The tokens of its answer."""
    engine = oracle(family)
    engine.add(engine.builder.build(prompt, RequestOptions(sampling, "off", request_id="oracle")))
    while True:
        for found in engine.step():
            assert found.error is None
            if found.part.output is not None:
                return found.part.output.token_ids


@torch.inference_mode()
def is_tie(family, request, tokens, other):
    """Whether full prefill prefers neither of two tokens behind `tokens`."""
    prompt = request.token_ids
    ids = torch.tensor([*prompt, *tokens])[None]
    with oracle(family).adapter.stock() as stock:
        logits = stock(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    logits = ruled(request.sampling, prompt, tokens, logits)[-1]
    return float(logits.max() - logits[list(other)].min()) < TIE


class Client:
    """Follows one stream as `StreamPart` says."""

    def __init__(self, request):
        self.request = request
        self.tokens = []
        self.outstanding = deque()

    def take(self, part):
        assert part.num_retracted <= len(self.outstanding)
        for _ in range(part.num_retracted):
            self.outstanding.pop()
        if part.is_provisional:
            assert self.request.provisional
            self.outstanding.append(part.token_id)
            return
        if self.outstanding and self.outstanding[0] == part.token_id:
            self.outstanding.popleft()
        else:
            self.outstanding.clear()
        self.tokens.append(part.token_id)


ASKED = st.fixed_dictionaries(
    {
        "chosen": st.lists(st.integers(0, 2), min_size=1, max_size=2),
        "new": st.integers(1, 20),
        "length": st.integers(1, 24),
        "reuse": st.sampled_from(["verified", "verified", "verified", "graft", "exact", "off"]),
        "provisional": st.booleans(),
        "sampled": st.booleans(),
        "salt": st.sampled_from(["", "", "", "x"]),
        "selection": st.sampled_from([None, None, "query_seam"]),
        "rules": RULES,
    }
)


class VerifiedMachine(DrawnTimeMachine):
    """Requests share documents; at most a few fit at once."""

    @initialize(
        seed=st.integers(0, 2**31),
        slots=st.integers(350, 800),
        max_rows=st.sampled_from([17, 64, 4096]),
        family=st.sampled_from(["llama", "gemma3_text"]),
        page=st.sampled_from([1, 16]),
        window_share=st.sampled_from([0.5, 0.01]),
        heal=st.sampled_from(["idle", "always"]),
    )
    def start(self, seed, slots, max_rows, family, page, window_share, heal):  # noqa: PLR0917 - hypothesis passes arguments by keyword
        self.rng = np.random.default_rng(seed)
        self.draw_time(seed)
        self.family = family
        config = EngineConfig(
            repair_below_margin=0,
            num_slots=slots,
            host_bytes=1_000_000,
            donor_tokens=1 << 14,
            max_rows=max_rows,
            max_running=6,
            page_size=page,
            heal=heal,
        )
        with mock.patch.object(slot_plan, "_MAX_WINDOW_SHARE", window_share):
            self.engine = Engine(adopt_model(family, model(family), None), config, max_step_s=0.01)
        self.documents = [self.rng.integers(3, VOCABULARY, int(self.rng.integers(80, 110))) for _ in range(3)]
        self.open = {}
        self.texts = []
        self.answered = {}
        self.engine.scheduler.preempt = partial(self.preempt, self.engine.scheduler.preempt)
        self.read_documents()
        for reuse in ("verified", "graft"):  # there is something to disturb, whatever hypothesis asks for
            self.add_request(self.quoting([0, 1], 9), SamplingParams(6, ignore_eos=True), reuse)

    def quoting(self, chosen, new):
        parts = [self.rng.integers(3, VOCABULARY, new), *(self.documents[i] for i in chosen)]
        return np.concatenate(parts)[:240]

    @rule(asked=st.lists(ASKED, min_size=1, max_size=4), count=st.integers(0, 30))
    def serve(self, asked, count):
        """Take requests and run some steps: one rule, because hypothesis leaves rules out of whole examples."""
        for one in asked[: 12 - len(self.open)]:
            prompt = self.quoting(one["chosen"], one["new"])
            drawn = {"temperature": 0.7, "seed": int(self.rng.integers(1000))} if one["sampled"] else {}
            self.add_request(
                prompt,
                SamplingParams(one["length"], ignore_eos=True, **drawn, **one["rules"]),
                one["reuse"],
                provisional=one["provisional"] and one["reuse"] == "verified",
                cache_salt=one["salt"],
                selection=one["selection"],
            )
        self.step(count)

    def preempt(self, preempt, active):
        """Note how many tokens of the answer there are when the slots of a request are taken."""
        self.answered[active.request.request_id] = len(active.output_ids)
        preempt(active)

    def read_documents(self):
        """Prompts that quote them are grafted from now on."""
        once = SamplingParams(1, ignore_eos=True)
        names = [self.add_request(document, once, "graft") for document in self.documents]
        while self.open.keys() & set(names):
            self.step(1)

    def add_request(self, prompt, sampling, reuse, *, provisional=False, **others):
        request = self.engine.builder.build(prompt, RequestOptions(sampling, reuse, **others))
        request = replace(request, provisional=provisional)
        self.submit(request)
        self.open[request.request_id] = Client(request)
        self.texts.append(request.token_ids.astype(np.int64))
        return request.request_id

    def step(self, count):
        for _ in range(count):
            for found in self.engine.step():
                assert found.error is None
                client = self.open[found.request_id]
                client.take(found.part)
                if found.part.output is not None:
                    del self.open[found.request_id]
                    self.finished(client, found.part.output)
            self.engine.check()

    def finished(self, client, output):
        request, tokens, report = client.request, tuple(client.tokens), output.report
        assert output.token_ids == tokens
        assert not client.outstanding, "what was shown is confirmed or retracted in the end"
        assert report.num_tokens == len(request.token_ids)
        self.texts.append(np.concatenate([request.token_ids, tokens[:-1]]).astype(np.int64))
        if request.reuse == "verified":
            assert report.shifted_tokens == report.recomputed_tokens == 0
            num_answered = self.answered.get(request.request_id, 0)
            self.healing_adds_up(report.healing, len(request.token_ids), num_answered)
        else:
            assert report.healing is None
        if not report.shifted_tokens and not report.recomputed_tokens:
            self.answers_as_full_prefill(request, tokens)

    def healing_adds_up(self, healing, num_tokens, num_answered):
        if healing is None:
            event("verified without a graft")
            return
        if not healing.spans:
            event("drafted, preempted, and nothing to graft the second time")
            assert healing.healed_tokens == 0
            assert 0 <= healing.drafted_tokens - healing.retracted_tokens <= num_answered, "confirmed before that"
            return
        assert 0 < healing.healed_tokens <= num_tokens
        assert 0 <= healing.retracted_tokens <= healing.drafted_tokens
        assert 0 < healing.first_provisional_s <= healing.healed_at_s
        event("retracted" if healing.retracted_tokens else "all confirmed")

    def answers_as_full_prefill(self, request, tokens):
        prompt = request.token_ids
        truth = full_prefill(self.family, tuple(prompt.tolist()), request.sampling)
        assert len(tokens) == len(truth)
        place = next((i for i, pair in enumerate(zip(tokens, truth, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            assert not request.sampling.temperature
            assert is_tie(self.family, request, tokens[:place], (tokens[place], truth[place]))

    @rule(index=st.integers(0, 11), kind=st.sampled_from(["cancel", "cancel", "preempt", "preempt", "forget", "heal"]))
    def disturb(self, index, kind):
        """Cancel a request, take the slots of one that runs, forget everything that is cached, or heal some pieces."""
        running = self.engine.scheduler.running
        if kind == "preempt" and index < len(running):
            self.engine.scheduler.preempt(running[index])
        elif kind == "cancel" and index < len(self.open):
            name = list(self.open)[index]
            assert self.engine.cancel(name)
            del self.open[name]
        elif kind == "forget":
            self.engine.reset()
            self.read_documents()
        elif kind == "heal":
            for _ in range(index):
                self.engine.heal_step()

    def look_at_what_is_kept(self):
        """Amid requests that draft: whatever is stored, and every donor that is said to be exact, is so."""
        adapter, space = self.engine.adapter, self.engine.space
        for text in self.texts[-4:]:
            for salt in ("", "x"):
                namespace = self.engine.builder.build(text[:1], RequestOptions(cache_salt=salt)).namespace
                assert_prefix_is_exact(adapter, space, namespace, text)
        assert_donors_are_exact(adapter, space, self.texts, last=6)

    @rule(is_amid=st.booleans())
    def look(self, is_amid):
        if is_amid:
            self.look_at_what_is_kept()
        else:
            self.run_dry()

    def run_dry(self):
        steps = 0
        while self.engine.has_work:
            self.step(1)
            steps += 1
            assert steps < 5_000
        assert not self.open
        assert self.engine.space.usage().request == 0
        self.look_at_what_is_kept()

    @invariant()
    def holds(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        assert self.engine.manager.num_errors == 0
        scheduler = self.engine.scheduler
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.open)
        held = sum(len(active.kv.kv_indices) for active in scheduler.running)
        assert self.engine.space.usage().request <= held
        assert all(not self.engine.space.donors.is_pinned(donor.donor_id) for donor in self.engine.space.donors)


VerifiedMachine.TestCase.settings = settings(max_examples=3, stateful_step_count=20, deadline=None)
TestVerified = VerifiedMachine.TestCase
