"""The whole K/V bookkeeping of an engine under random requests: nothing leaks, nothing is served from the wrong tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

NUM_SLOTS = 900
TWO = SamplingParams(2, ignore_eos=True)


class EngineCacheMachine(RuleBasedStateMachine):
    """Prompts are built from a few documents in a pool that is too small for them."""

    @initialize(
        seed=st.integers(0, 2**31), page_size=st.sampled_from([1, 16, 64]), host_bytes=st.sampled_from([400_000, 0])
    )
    def start(self, seed, page_size, host_bytes):
        torch.manual_seed(0)
        self.rng = np.random.default_rng(seed)
        self.llm = LLM(
            adopt_model("llama", tiny_model("llama"), None),
            repair_below_margin=0,
            num_slots=NUM_SLOTS,
            donor_tokens=1 << 13,
            host_bytes=host_bytes,
            selection="query_seam",
            page_size=page_size,
        )
        self.documents = [self.rng.integers(3, VOCABULARY, int(self.rng.integers(90, 140))) for _ in range(4)]
        for document in self.documents:  # prompts that quote them are grafted from now on
            self.llm.generate(document, TWO)

    def prompt(self, chosen, new):
        return np.concatenate([self.rng.integers(3, VOCABULARY, new), *(self.documents[i] for i in chosen)])[:400]

    chosen = st.lists(st.integers(0, 3), min_size=1, max_size=3)

    @rule(
        chosen=chosen,
        new=st.integers(0, 30),
        reuse=st.sampled_from(["off", "exact", "graft", "graft"]),
        salt=st.sampled_from(["", "", "x"]),
    )
    def generate(self, chosen, new, reuse, salt):
        prompt = self.prompt(chosen, new)
        output = self.llm.generate(prompt, TWO, reuse, cache_salt=salt)[0]
        report = output.report
        assert report.num_tokens == len(prompt) == report.reused_tokens + report.computed_tokens
        copied = sum(span.length for span in report.spans if span.fidelity == "exact")
        assert (report.exact_tokens - copied) % self.llm.config.page_size == 0, "whole pages"
        assert all(report.exact_tokens <= span.target_start for span in report.spans if span.fidelity != "exact")
        assert all(len(prompt) >= span.target_start + span.length for span in report.spans)

    @rule(chosen=chosen, new=st.integers(0, 30))
    def cancel(self, chosen, new):
        stream = self.llm.stream(self.prompt(chosen, new), TWO)
        next(stream)
        stream.close()

    @rule(chosen=chosen)
    def score(self, chosen):
        self.llm.score(self.prompt(chosen, 5), [3, 4])

    @rule()
    def reset(self):
        self.llm.reset()
        assert self.llm.usage().free == NUM_SLOTS

    @invariant()
    def holds(self):
        if hasattr(self, "llm"):
            self.llm.check()
            assert self.llm.usage().request == 0
            assert self.llm.num_errors == 0


EngineCacheMachine.TestCase.settings = settings(max_examples=7, stateful_step_count=20, deadline=None)
TestEngineCache = EngineCacheMachine.TestCase
