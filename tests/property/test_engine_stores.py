"""An engine over a store that fails at random, beside another that shares it: never wrong K/V, never a failed request.

The oracle: K/V of the first layer depend on nothing but a token and its position, so that stock transformers say what they
are wherever they come from, grafted, promoted or computed.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.fidelity import cache_of
from kvgraft.memory.store import register_store
from kvgraft.memory.store.record import DonorRecord, decode_head
from kvgraft.reuse import reads as reads_module
from kvgraft.reuse.stored import StoredKV
from kvgraft.testing.memory_store import Faults, FaultyStore, MemoryStore
from kvgraft.testing.registries import isolated_registries
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

TWO = SamplingParams(2, ignore_eos=True)
WAIT_S = 60.0
TOLERANCE = 2e-4


class EngineStoresMachine(RuleBasedStateMachine):
    """Two engines over one store, in pools that are too small for the documents."""

    @initialize(seed=st.integers(0, 2**31), host_bytes=st.sampled_from([0, 200_000, 10_000_000]))
    def start(self, seed, host_bytes):
        self.isolation = isolated_registries()
        self.isolation.__enter__()
        self.patience, reads_module._LEAST_PATIENCE_S = reads_module._LEAST_PATIENCE_S, WAIT_S
        self.rng = np.random.default_rng(seed)
        self.memory = MemoryStore(max_bytes=1_500_000)
        self.faults = Faults(chance=0.3, seed=seed, hang_s=0.01)
        register_store("shared", lambda where, options: FaultyStore(self.memory, self.faults))
        self.host_bytes = host_bytes
        self.scale = [0, 0]
        self.llms = [self.make(0), self.make(1)]
        self.documents = [self.rng.integers(3, VOCABULARY, int(self.rng.integers(70, 300))) for _ in range(4)]
        for new in (0, 9):  # the second quotes what the first has read, whatever rules hypothesis leaves out
            self.llms[0].generate(self.prompt([0], new), TWO)

    def make(self, number):
        llm = LLM(
            adopt_model("llama", self.model(number), None),
            repair_below_margin=0,
            num_slots=700,
            host_bytes=self.host_bytes,
            store="shared:",
        )
        llm.engine.stores.flops_per_s = lambda: 1.0
        return llm

    def model(self, number):
        torch.manual_seed(0)
        model = tiny_model("llama")
        change(model, self.scale[number])
        return model

    def teardown(self):
        if not hasattr(self, "llms"):
            return
        for llm in self.llms:
            llm.close()
        reads_module._LEAST_PATIENCE_S = self.patience
        self.isolation.__exit__(None, None, None)

    def prompt(self, chosen, new):
        return np.concatenate([self.rng.integers(3, VOCABULARY, new), *(self.documents[i] for i in chosen)])[:600]

    which = st.integers(0, 1)
    chosen = st.lists(st.integers(0, 3), min_size=1, max_size=3)

    @rule(which=which, chosen=chosen, new=st.integers(0, 30), salt=st.sampled_from(["", "x"]))
    def generate(self, which, chosen, new, salt):
        prompt = self.prompt(chosen, new)
        report = self.llms[which].generate(prompt, TWO, cache_salt=salt)[0].report
        assert report.num_tokens == len(prompt) == report.reused_tokens + report.computed_tokens
        assert sum(span.length for span in report.spans) >= report.shifted_tokens

    @rule(which=which, chosen=chosen, new=st.integers(0, 30))
    def compare(self, which, chosen, new):
        prompt = self.prompt(chosen, new)
        for llm in self.llms:
            llm.sync_stores(WAIT_S)
        expected = first_layer(self.model(which), prompt)
        with self.llms[which].probe(prompt, 1) as probe:
            for got, wanted in zip(probe.kv(0), expected, strict=True):
                assert (got - wanted).abs().max() < TOLERANCE

    @rule(which=which, number=st.integers(0, 20), reuse=st.sampled_from(["exact", "graft"]))
    def ask_for_a_stored_part(self, which, number, reuse):
        """Exactly its tokens, at the beginning of a prompt, wherever they stood when it was stored."""
        records = self.records()
        records = [record for record in records if record.start_position] or records
        if records:
            record = records[number % len(records)]
            self.llms[which].sync_stores(WAIT_S)
            self.llms[which].generate(record.token_ids.astype(np.int64), TWO, reuse=reuse)
            self.llms[which].generate(self.rng.integers(3, VOCABULARY, 650), TWO, reuse=reuse)  # takes its slots

    @rule(which=which, chosen=chosen, new=st.integers(65, 120))
    def converse(self, which, chosen, new):
        """Two turns: what the second adds is stored by itself, from where it stands."""
        prompt = self.prompt(chosen, 0)[:400]
        output = self.llms[which].generate(prompt, TWO)[0]
        more = self.rng.integers(3, VOCABULARY, new)
        self.llms[which].generate(np.concatenate([prompt, output.token_ids, more]), TWO)

    def records(self):
        """Of all spaces, in an order that does not depend on threads."""
        heads = [(space, key, head) for (space, key), (head, _) in list(self.memory.objects.items())]
        decoded = [decode_head(head, space, key).record for space, key, head in heads]
        return sorted(decoded, key=lambda record: (record.key, record.num_tokens))

    @rule(which=which, chosen=chosen)
    def cancel(self, which, chosen):
        stream = self.llms[which].stream(self.prompt(chosen, 3), TWO)
        next(stream)
        stream.close()

    @rule(which=which, chosen=chosen)
    def leave_while_it_is_read(self, which, chosen):
        engine = self.llms[which]._engine
        engine.add(engine.builder.build(self.prompt(chosen, 7), RequestOptions(TWO, request_id="leaves")))
        engine.step()
        engine.cancel("leaves")

    @rule(which=which)
    def sync(self, which):
        self.llms[which].sync_stores(WAIT_S)

    @rule(which=which, graceful=st.booleans())
    def restart(self, which, graceful):
        if graceful:
            self.llms[which].close()
        else:
            for used in self.llms[which].engine.stores.stores:
                used.stop(0.0)
        self.llms[which] = self.make(which)

    @rule(which=which, changes=st.booleans())
    def reset(self, which, changes):
        if changes:
            self.scale[which] += 1
            change(self.llms[which].loaded.model, 1)
        self.llms[which].reset()
        assert self.llms[which].usage().free == 700

    @rule(
        fault=st.sampled_from(["fail", "hang", "corrupt", "truncate", "lose", "full"]),
        method=st.sampled_from(["put", "keys", "heads", "read"]),
    )
    def break_something(self, fault, method):
        getattr(self.faults, fault).add(method)

    @rule()
    def mend(self):
        for fault in ("fail", "hang", "corrupt", "truncate", "lose", "full"):
            getattr(self.faults, fault).clear()

    @rule()
    def lose_an_object(self):
        for space, key in list(self.memory.objects)[:1]:
            self.memory.remove(space, key)

    @invariant()
    def cold_donors_are_what_their_keys_say(self):
        for llm in getattr(self, "llms", ()):
            for donor in llm.space.donors:
                if isinstance(donor.kv, StoredKV):
                    own = DonorRecord.of(donor)
                    assert donor.kv.key == own.key

    @invariant()
    def holds(self):
        for llm in getattr(self, "llms", ()):
            llm.check()
            assert llm.usage().request == 0
            assert llm.num_errors == 0


def change(model, times):
    """Other weights, the same each time; in the first layer, too."""
    with torch.no_grad():
        for _ in range(times):
            for parameter in model.parameters():
                parameter.mul_(1.01)


@torch.inference_mode()
def first_layer(model, prompt):
    """Keys and values of layer 0, (num_tokens, heads, dim), by transformers alone."""
    cache = cache_of(model(input_ids=torch.from_numpy(prompt)[None], use_cache=True))
    return cache.layers[0].keys[0].transpose(0, 1), cache.layers[0].values[0].transpose(0, 1)


EngineStoresMachine.TestCase.settings = settings(max_examples=3, stateful_step_count=25, deadline=None)
TestEngineStores = EngineStoresMachine.TestCase
