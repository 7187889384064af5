"""The recipes of CONTRIBUTING, followed to the letter with toys: in a copy of the package where they change files of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import count

import numpy as np
import pytest
import torch
from tests.docs.code_index import SOURCE
from tests.docs.pages import page

from kvgraft.donors import CostModel, DonorCatalogue
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.model.self_check import probe_slots, self_check
from kvgraft.graft.executor import RotatedSpans, SpanCopy, copy_spans
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.memory.store import register_store
from kvgraft.prefix import RadixCache, RadixKey
from kvgraft.reuse.donor_rules import DonorRules
from kvgraft.reuse.lineage import Lineage, reused_span
from kvgraft.reuse.lookup import Lookup
from kvgraft.reuse.metrics import samples
from kvgraft.reuse.policy import configured_policy
from kvgraft.reuse.report import report_as_dict, request_report
from kvgraft.semantic import Embedder, EmbeddingProvider, register_embedder, unit_rows
from kvgraft.testing import tiny_models
from kvgraft.testing.memory_store import MemoryStore
from kvgraft.types import GraftPlan, Namespace

RECIPES = {
    "a selection policy": "test_a_selection_policy",
    "an architecture": "test_an_architecture",
    "a kind of layer": "test_a_kind_of_layer",
    "an attention backend": "test_an_attention_backend",
    "an engine": "TestEngine",
    "a setting": "test_a_setting",
    "an eviction policy of the prefix cache": "test_an_eviction_policy",
    "a prefix-cache backend": "test_a_prefix_cache_backend",
    "a KV store": "test_a_kv_store",
    "an embedder": "TestEmbedder",
}


def test_every_recipe_is_followed_here():
    assert set(re.findall(r"^## Adding (.+)$", page("CONTRIBUTING.md").prose, re.MULTILINE)) == set(RECIPES)
    for test in RECIPES.values():
        assert test in globals()


LAST_K = '''
"""Recompute the tail of every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvgraft.graft.select.base import Recompute, SelectionContext, SelectionPolicy, SelectionSteps


@dataclass(frozen=True)
class LastK(SelectionPolicy):
    """Recompute the last `k` tokens of each run."""

    name: ClassVar[str] = "last_k"
    k: int = 4

    @property
    def recompute_ratio(self) -> float:
        """Little."""
        return 0.01

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Take one step."""
        starts = np.flatnonzero(context.seam_distance == 0)
        runs = np.split(context.reused, starts[1:])
        yield Recompute(np.concatenate([run[-self.k :] for run in runs]))
'''

TOY_ATTENTION = '''
"""`sdpa` under another name."""

from kvgraft.engine.attention.sdpa import SdpaBackend


class ToyBackend(SdpaBackend):
    """Differs in its name only."""

    name = "toy"
'''

BIGGEST_FIRST = '''

@dataclass(frozen=True, slots=True)
class BiggestFirst(EvictionPolicy):
    """What reaches farthest leaves first."""

    def __call__(self, node: EvictionFacts) -> EvictionKey:
        """Length of the longest prompt through the node."""
        return -node.reach

'''

USE = """
import json, logging
import numpy as np
from kvgraft.config import EngineConfig, SGLangConfig, VLLMConfig, resolve, settings_table
from kvgraft.cli import build_parser
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.prefix import RadixCache, RadixKey
from kvgraft.testing.tiny_models import tiny_model

found = {}
model = adopt_model("llama", tiny_model("llama"), None)
llm = LLM(model, num_slots=1000, selection="last_k", last_k=7, attention="toy", host_bytes=0)
rng = np.random.default_rng(0)
document = rng.integers(3, 500, 100)
llm.generate(document, SamplingParams(1))
report = llm.generate(np.concatenate([rng.integers(3, 500, 20), document, [5]]), SamplingParams(1))[0].report
found["policy"], found["recomputed"], found["shifted"] = report.policy, report.recomputed_tokens, report.shifted_tokens
found["vllm"] = VLLMConfig(selection="last_k").selection
found["sglang"] = SGLangConfig(donor_tokens=100_000, selection="last_k").selection
found["attention"] = type(llm.adapter.attention.backend).__name__

flags = vars(build_parser().parse_args(["serve", "--toy-limit", "9"]))
found["flag"] = flags["setting_toy_limit"]
found["env"] = resolve(EngineConfig, environ={"KVGRAFT_TOY_LIMIT": "5"}).config.toy_limit
found["table"] = "toy_limit" in settings_table()
try:
    EngineConfig(toy_limit=0)
except Exception as error:
    found["limits"] = str(error)

cache = RadixCache(policy="biggest_first")
for first, length in ((1, 4), (2, 9), (3, 6)):
    cache.insert(RadixKey(np.arange(first * 100, first * 100 + length)), np.arange(first * 10, first * 10 + length))
found["evicted"] = sorted(cache.evict(1).freed.tolist())
model = adopt_model("llama", tiny_model("llama"), None)
found["eviction"] = type(LLM(model, num_slots=100, eviction_policy="biggest_first").space.prefix.policy).__name__
print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of the package with a selection policy, an attention backend, a setting and an eviction policy more."""
    root = tmp_path_factory.mktemp("copy") / "src" / "kvgraft"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("models", "__pycache__"))
    (root / "models").symlink_to(SOURCE / "models")

    def edit(name, *changes):
        path = root / name
        text = path.read_text()
        for old, new in changes:
            assert old in text, f"{name} has no {old!r} any more: follow the recipe anew"
            text = text.replace(old, new, 1)
        path.write_text(text)

    (root / "graft/select/last_k.py").write_text(LAST_K)
    line = ('        "none": NoRecompute,\n', '        "none": NoRecompute,\n        "last_k": LastK,\n')
    imported = ("from kvgraft.graft.select.first_k import", "from kvgraft.graft.select.last_k import LastK\n")
    edit("graft/select/__init__.py", line, (imported[0], imported[1] + imported[0]))
    for engine in ("engine", "vllm", "reuse"):
        edit(f"config/{engine}.py", ('choices=("none", ', 'choices=("none", "last_k", '))
    edit(
        "config/reuse.py",
        ("    first_k: int", '    last_k: int = setting(4, "tokens", REUSE, low=1)\n    first_k: int'),
    )
    edit(
        "reuse/policy.py",
        ("    first_k: int,\n", "    first_k: int,\n    last_k: int = 4,\n"),
        (
            "    if name == FirstK.name:",
            '    if name == "last_k":\n        return selection_policy(name, k=last_k)\n    if name == FirstK.name:',
        ),
    )
    edit(
        "engine/requests/request_builder.py", ("first_k=config.first_k", "first_k=config.first_k, last_k=config.last_k")
    )

    (root / "engine/attention/toy.py").write_text(TOY_ATTENTION)
    edit(
        "engine/attention/choose.py",
        ('    "flex": _flex,\n', '    "flex": _flex,\n    "toy": lambda _device: ToyBackend(),\n'),
        (
            "from kvgraft.engine.attention.sdpa",
            "from kvgraft.engine.attention.toy import ToyBackend\nfrom kvgraft.engine.attention.sdpa",
        ),
    )
    edit("config/engine.py", ('"flex"', '"flex", "toy"'))
    edit(
        "config/engine.py",
        ("    dtype: str", '    toy_limit: int = setting(3, "a toy", SCHEDULING, low=1)\n    dtype: str'),
    )
    edit(
        "prefix/eviction/policies.py",
        ("\nEVICTION_POLICIES:", BIGGEST_FIRST + "\nEVICTION_POLICIES:"),
        ('    "fifo": FIFO,\n', '    "fifo": FIFO,\n    "biggest_first": BiggestFirst,\n'),
    )
    edit("config/engine.py", ('choices=("fifo", ', 'choices=("biggest_first", "fifo", '))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGRAFT_")}
    environ |= {"PYTHONPATH": str(root.parent)}
    done = subprocess.run([sys.executable, "-c", USE], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_selection_policy(changed):
    assert changed["policy"] == "last_k"
    assert (changed["recomputed"], changed["shifted"]) == (7, 100 - 7)
    assert changed["vllm"] == changed["sglang"] == "last_k"


def test_an_attention_backend(changed):
    assert changed["attention"] == "ToyBackend"


def test_a_setting(changed):
    assert (changed["env"], changed["table"]) == (5, True)
    assert int(changed["flag"]) == 9
    assert "toy_limit must be at least 1" in changed["limits"]


def test_an_eviction_policy(changed):
    assert changed["evicted"] == list(range(20, 29))
    assert changed["eviction"] == "BiggestFirst"


def test_an_architecture(monkeypatch):
    monkeypatch.setitem(tiny_models.FAMILIES, "seed_oss", {})
    llm = LLM(adopt_model("seed_oss", tiny_models.tiny_model("seed_oss"), None), num_slots=500)
    assert llm.graft_refusal is None
    assert len(llm.generate(np.arange(3, 40), SamplingParams(3, ignore_eos=True))[0].token_ids) == 3


def test_a_kind_of_layer(monkeypatch):
    """A family with states that is not among the tested ones, and needs no code."""
    sizes = tiny_models.STATE_FAMILIES["qwen3_next"]
    monkeypatch.setitem(tiny_models.STATE_FAMILIES, "qwen3_5_moe_text", sizes)
    adapter = TransformersAdapter.create(tiny_models.tiny_model("qwen3_5_moe_text"), num_slots=256)
    assert len(adapter.layers.mixers) == 2
    assert self_check(adapter, np.arange(probe_slots(adapter))).forward_error < 1e-4


def test_a_prefix_cache_backend(monkeypatch, tmp_path):
    """From a package of its own, which is found by its entry point."""
    (tmp_path / "toy_cache.py").write_text(
        "from kvgraft.prefix import RadixCache\nclass ToyCache(RadixCache):\n    pass\n"
        "def factory(context):\n    return ToyCache(context.page_size)\n"
    )
    info = tmp_path / "toy_cache-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-cache\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvgraft.prefix_caches]\ntoy = toy_cache:factory\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = adopt_model("llama", tiny_models.tiny_model("llama"), None)
    llm = LLM(model, num_slots=300, radix_cache_backend="toy")
    llm.generate(np.arange(3, 100), SamplingParams(1))
    again = llm.generate(np.arange(3, 110), SamplingParams(1))[0]
    assert again.report.exact_tokens == 97
    llm.check()
    assert "ToyCache" in {type(value).__name__ for value in vars(llm.space).values()}


def test_a_kv_store():
    """A donor that one engine has stored is found by the next; `tests/conformance` runs the suite on the class."""
    kept, opened = MemoryStore(), []

    def factory(where, options):
        opened.append((where, dict(options)))
        return kept

    register_store("toy", factory)
    document, shift = np.arange(3, 203), [7, 8, 9]
    answers = {}
    for name in ("host", "toy:here?size=3", "toy:here?size=3"):
        llm = LLM(
            adopt_model("llama", tiny_models.tiny_model("llama"), None), num_slots=600, selection="none", store=name
        )
        if llm.engine.stores is not None:
            llm.engine.stores.flops_per_s = lambda: 1.0  # so slow that every read pays
            deadline = time.monotonic() + 60
            while opened[1:] and not len(llm.space.donors):
                assert time.monotonic() < deadline
                llm.engine.poll_stores()
                time.sleep(0.01)
        if not opened[1:]:
            llm.generate(document, SamplingParams(1))
        answers.setdefault(name, []).append(
            llm.generate(np.concatenate([shift, document, [5]]), SamplingParams(4, ignore_eos=True))[0]
        )
        llm.check()
        llm.close()
    assert opened == [("here", {"size": "3"})] * 2
    (space,) = {space for space, _ in kept.objects}
    assert kept.keys(space)
    again = answers["toy:here?size=3"][1]
    assert again.report.shifted_tokens == 200
    assert {tuple(one.token_ids) for runs in answers.values() for one in runs} == {tuple(again.token_ids)}


class TestEmbedder:
    """A toy that looks at nothing but the first tokens, as a donor proposer and behind the semantic hook."""

    DOCUMENT = np.arange(3, 203)

    @pytest.fixture(autouse=True)
    def registered(self):
        class FirstTokens(Embedder):
            name, dimensions, is_quick = "first_tokens", 8, True

            def embed(self, texts):
                return unit_rows(np.stack([np.resize(text, 8) for text in texts]).astype(np.float32))

        self.given = []
        register_embedder("toy", lambda **given: self.given.append(given) or FirstTokens())

    def test_proposes_donors(self):
        llm = LLM(adopt_model("llama", tiny_models.tiny_model("llama"), None), num_slots=600, embedder="toy:weights")
        assert [given["path"] for given in self.given] == ["weights"]
        llm.generate(self.DOCUMENT, SamplingParams(1))
        (donor,) = llm.space.donors
        proposer = llm.engine.proposer
        assert proposer.discovery.wait(60)
        namespace = donor.namespace
        assert proposer.propose(namespace, self.DOCUMENT[:50]) == (donor.donor_id,)
        assert proposer.propose(namespace, -self.DOCUMENT) == ()

    def test_makes_a_provider(self):
        provider = EmbeddingProvider("toy")
        provider.on_request_cached(rid="r", token_ids=self.DOCUMENT)
        assert provider.discovery.wait(60)
        prompt = np.append(self.DOCUMENT[:20], 300)
        assert provider.on_prefix_miss(rid="q", token_ids=prompt).alternate_token_ids == self.DOCUMENT.tolist()
        provider.on_shutdown()


class Rows:
    """K/V of consecutive positions of a toy model: `KVSource` and `KVPlace`."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def read(self, layer):
        return self.keys[layer], self.values[layer]

    def write(self, layer, keys, values):
        self.keys[layer][:], self.values[layer][:] = keys, values


class ToyEngine:
    """One layer, one head of two channels: a token's key is its id, rotated by its position; its value is its id."""

    def __init__(self):
        self.catalogue = DonorCatalogue(10_000)
        self.namespace = Namespace("toy")
        self.lookup = Lookup(self.catalogue, min_run=16, max_generation=2)
        self.registration = DonorRules(self.catalogue, min_run=16, max_generation=2)
        self.policy = configured_policy("none", first_k=1)
        self.rope = [RopeSpec(torch.tensor([1.0]), RopePairing.HALF)]
        self.prefixes = RadixCache()
        self.slots = count()
        self.reports = []

    def compute(self, token_ids, start):
        angle = torch.arange(start, start + len(token_ids), dtype=torch.float32)
        ids = torch.as_tensor(token_ids, dtype=torch.float32)
        keys = torch.stack([ids * angle.cos(), ids * angle.sin()], -1)[:, None]
        return Rows([keys], [ids[:, None, None].expand(-1, 1, 2).clone()])

    def run(self, prompt, preempt_at=None):
        prompt = np.asarray(prompt)
        hit = self.prefixes.match_prefix(RadixKey(prompt[:-1])).prefix_len
        lineage = Lineage(hit)
        costs = CostModel(
            attention_per_key=0, copy_per_token=0, per_span=0, recompute_ratio=self.policy.recompute_ratio
        )
        found = self.lookup.find(self.namespace, prompt, hit, costs)
        kv = self.compute(prompt, 0)
        if isinstance(found.planned, GraftPlan):
            self.copy(found.planned, lineage, kv)
        if preempt_at is not None:
            lineage.restart(preempt_at)
        exact = lineage.exact_len(len(prompt))
        self.prefixes.insert(RadixKey(prompt[:exact]), np.array([next(self.slots) for _ in range(exact)], np.int64))
        for run in self.registration.runs(lineage, 0, len(prompt)):
            text = prompt[run.start : run.stop]
            if not self.registration.is_known(self.namespace, text, run.generation):
                rows = Rows([kv.keys[0][run.start : run.stop]], [kv.values[0][run.start : run.stop]])
                self.catalogue.add(self.namespace, text, rows, generation=run.generation, start_position=run.start)
        lineage.check()
        miss = None if isinstance(found.planned, GraftPlan) else found.planned
        report = request_report(
            lineage, len(prompt), policy=self.policy.name, timings_ms={"lookup": found.lookup_ms}, miss=miss
        )
        self.reports.append(report)
        return report, kv

    def copy(self, plan, lineage, kv):
        for match in plan.spans:
            donor = self.catalogue.get(match.donor_id)
            inside = slice(match.donor_start, match.donor_start + match.length)
            source = Rows([donor.kv.keys[0][inside]], [donor.kv.values[0][inside]])
            target = slice(match.target_start, match.target_start + match.length)
            place = Rows([kv.keys[0][target]], [kv.values[0][target]])
            place.keys[0].zero_()
            start = donor.start_position + match.donor_start
            spans = RotatedSpans(
                [SpanCopy(source, start, match.target_start, match.length)], self.rope, torch.device("cpu")
            )
            copy_spans(spans, place, [0])
            lineage.copy([reused_span(match, donor)])


class TestEngine:
    DOCUMENT = np.arange(100, 180)

    def test_text_is_moved_and_its_keys_rotated(self):
        engine = ToyEngine()
        engine.run(self.DOCUMENT)
        prompt = np.concatenate([np.arange(20), self.DOCUMENT, [7]])
        report, kv = engine.run(prompt)
        assert (report.exact_tokens, report.shifted_tokens, report.computed_tokens) == (0, 80, 21)
        torch.testing.assert_close(kv.keys[0], engine.compute(prompt, 0).keys[0], rtol=1e-4, atol=1e-3)
        assert report_as_dict(report)["spans"][0]["position_delta"] == 20
        assert {sample.metric.name for sample in samples(report)} >= {"prompt_tokens", "grafted_requests"}

    def test_nothing_behind_a_graft_is_ever_an_exact_hit(self):
        engine = ToyEngine()
        engine.run(self.DOCUMENT)
        prompt = np.concatenate([np.arange(20), self.DOCUMENT, np.arange(300, 340)])
        first, _ = engine.run(prompt, preempt_at=60)
        again, _ = engine.run(prompt)
        assert first.exact_tokens == 0
        assert again.exact_tokens == 20
        generations = {donor.generation for donor in engine.catalogue}
        assert generations == {0, 1}

    def test_failures_are_misses(self, caplog):
        engine = ToyEngine()
        engine.run(self.DOCUMENT)
        engine.lookup = Lookup([None], min_run=16, max_generation=2)
        report, _ = engine.run(np.concatenate([np.arange(20), self.DOCUMENT, [7]]))
        assert report.miss.reason.value == "error"
        assert "a lookup failed" in caplog.text
