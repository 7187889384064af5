"""An engine with a pool that is too small and host memory behind it: answers are those of a cold run, nothing leaks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

THREE = SamplingParams(3, ignore_eos=True)
NUM_SLOTS = 200


class HostTierMachine(RuleBasedStateMachine):
    """Conversations that share beginnings, in a pool that holds two of them; a stock forward pass is the oracle."""

    family = "llama"

    @initialize(seed=st.integers(0, 2**31), host_bytes=st.sampled_from([60 << 10, 200 << 10, 4 << 20]))
    def start(self, seed, host_bytes):
        torch.manual_seed(0)
        rng = np.random.default_rng(seed)
        self.model = tiny_model(self.family)
        self.llm = LLM(
            adopt_model(self.family, tiny_model(self.family), None),
            repair_below_margin=0,
            num_slots=NUM_SLOTS,
            max_running=2,
            host_bytes=100_000,
            prefix_host_bytes=host_bytes,
        )
        roots = [rng.integers(3, VOCABULARY, 60) for _ in range(3)]
        self.prompts = [
            np.concatenate([roots[i % 3], rng.integers(3, VOCABULARY, int(rng.integers(5, 70)))]) for i in range(7)
        ]
        self.answers = {}

    def cold(self, prompt):
        """Greedy tokens of the model itself, without any cache."""
        key = prompt.tobytes()
        if key not in self.answers:
            tokens = torch.from_numpy(prompt)[None]
            for _ in range(3):
                with torch.no_grad():
                    token = self.model(tokens, use_cache=False).logits[0, -1].argmax()
                tokens = torch.cat([tokens, token[None, None]], dim=1)
            self.answers[key] = tokens[0, -3:].tolist()
        return self.answers[key]

    which = st.tuples(st.integers(0, 6), st.integers(20, 130)).map(tuple)

    @rule(which=which, salt=st.sampled_from(["", "x"]))
    def exact(self, which, salt):
        number, length = which
        prompt = self.prompts[number][:length]
        output = self.llm.generate(prompt, THREE, "exact", cache_salt=salt)[0]
        assert list(output.token_ids) == self.cold(prompt)
        assert output.report.exact_tokens + output.report.computed_tokens == len(prompt)

    @rule(which=which)
    def continued(self, which):
        """A second turn on the first one's answer, whose K/V may have left the device in between."""
        number, length = which
        prompt = self.prompts[number][:length]
        prompt = np.concatenate([prompt, self.cold(prompt)])
        assert list(self.llm.generate(prompt, THREE, "exact")[0].token_ids) == self.cold(prompt)

    @rule(which=which)
    def graft(self, which):
        number, length = which
        report = self.llm.generate(self.prompts[number][::-1][:length].copy(), THREE, "graft")[0].report
        assert report.num_tokens == report.reused_tokens + report.computed_tokens

    @rule(which=which, other=which)
    def side_by_side(self, which, other):
        streams = [self.llm.stream(self.prompts[n][:length], THREE, "exact") for n, length in (which, other)]
        next(streams[0])
        next(streams[1])
        streams[0].close()
        answer = [part.token_id for part in streams[1]]
        assert answer == self.cold(self.prompts[other[0]][: other[1]])[1:]

    @rule()
    def reset(self):
        self.llm.reset()
        assert self.llm.usage().free == NUM_SLOTS
        assert self.llm.space.prefix_host_bytes == 0

    @invariant()
    def holds(self):
        if hasattr(self, "llm"):
            self.llm.check()
            assert self.llm.usage().request == 0
            assert self.llm.num_errors == 0


class HostStatesMachine(HostTierMachine):
    family = "granitemoehybrid"


HostTierMachine.TestCase.settings = settings(max_examples=3, stateful_step_count=20, deadline=None)
HostStatesMachine.TestCase.settings = settings(max_examples=2, stateful_step_count=15, deadline=None)
TestHostTier = HostTierMachine.TestCase
TestHostStates = HostStatesMachine.TestCase
