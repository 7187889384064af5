"""A pool of real tensors, a tree that is a dictionary, and requests with the fields that the integration reads."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from kvgraft.config.sglang import SGLangConfig
from kvgraft.donors import CostModel
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.integrations.sglang.donors.continuations import Continuations
from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
from kvgraft.integrations.sglang.donors.loader import Loader
from kvgraft.integrations.sglang.donors.request_texts import RequestTexts
from kvgraft.integrations.sglang.donors.tree import Resident
from kvgraft.integrations.sglang.planning.planner import LoadPlanner
from kvgraft.integrations.sglang.planning.ranks import Ranks
from kvgraft.integrations.sglang.reporting.reports import RequestLog
from kvgraft.integrations.sglang.requests.books import Books
from kvgraft.integrations.sglang.requests.decisions import LoadDecisions
from kvgraft.integrations.sglang.requests.ends import Ends
from kvgraft.integrations.sglang.requests.loading import Loading
from kvgraft.integrations.sglang.requests.passes import PolicyPasses
from kvgraft.integrations.sglang.requests.promises import Promises
from kvgraft.integrations.sglang.requests.publishing import Publishing
from kvgraft.integrations.sglang.requests.repairs import Repairs
from kvgraft.integrations.sglang.requests.store_use import StoreUse
from kvgraft.integrations.sglang.reuse import RequestReuse
from kvgraft.integrations.sglang.stored.link import StoreLink
from kvgraft.reuse.metrics import MetricKind
from kvgraft.types import RepairTime

SLOTS, LAYERS, HEADS, DIM = 1024, 2, 2, 8
INV_FREQ = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)


class FakeTree:
    """Paths by namespace and tokens; one that goes on from another takes its place, and all have slots of their own.

    Eviction drops the tail of the oldest path.
    """

    def __init__(self, page_size=1):
        self.page_size = page_size
        self.paths = {}
        self.free_slots = list(range(1, SLOTS))
        self.pins = []
        self.on_evicted = None

    def resident(self, text, end):
        best, node = 0, None
        end = -(-end // self.page_size) * self.page_size
        for key, (tokens, slots) in self.paths.items():
            if key[:2] != (text.extra_key, text.cache_salt):
                continue
            length = 0
            while (
                length < min(end, len(tokens), len(slots), len(text.tokens)) and tokens[length] == text.tokens[length]
            ):
                length += 1
            if length > best:
                best, node = length, key
        return Resident(best // self.page_size * self.page_size, node)

    def touch(self, text, end):
        pass

    def pin(self, node):
        self.pins.append(node)
        return node

    def unpin(self, pin):
        self.pins.remove(pin)

    def slots(self, node):
        return torch.tensor(self.paths[node][1])

    def allocate(self, num_tokens):
        while len(self.free_slots) < num_tokens:
            victim = next((key for key in self.paths if key not in self.pins and self.paths[key][1]), None)
            if victim is None:
                return None
            self.evict(victim, 0)
        taken, self.free_slots = self.free_slots[:num_tokens], self.free_slots[num_tokens:]
        return torch.tensor(taken)

    def free(self, slots):
        self.free_slots += slots.tolist()

    def adopt(self, text, slots, known):
        found = self.resident(text, len(slots))
        assert found.length == known
        old = self.paths.pop(found.node)[1] if known else []
        assert len(old) == known, "paths do not branch here"
        self.paths[text.extra_key, text.cache_salt, text.tokens.tobytes()] = (text.tokens, old + slots.tolist()[known:])

    def insert(self, tokens, slots, extra_key=None, cache_salt=None):
        key = (extra_key, cache_salt, tokens.tobytes())
        self.paths[key] = (tokens, slots.tolist())
        return key

    def evict(self, key, keep):
        tokens, slots = self.paths[key]
        self.paths[key] = (tokens, slots[:keep])
        if self.on_evicted is not None:
            self.on_evicted([torch.tensor(slots[keep:])])
        self.free_slots += slots[keep:]


@dataclass(eq=False)
class FakeRequest:
    """The fields of SGLang's `Req` that the integration reads or sets."""

    rid: str
    origin_input_ids: array
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    output_ids: array = field(default_factory=lambda: array("q"))
    cache_request_handle: SimpleNamespace = field(default_factory=SimpleNamespace)
    sampling_params: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(custom_params=None, max_new_tokens=32, regex=None, ebnf=None)
    )
    to_finish: object = None
    finished_reason: object = None
    session = multimodal_inputs = input_embeds = positional_embed_overrides = beam_group = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    skip_radix_cache_insert: bool = False
    prefix_len: int = 0
    is_finished: bool = False
    kv: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(cache_protected_len=0, req_pool_idx=None))
    owned: int = 0

    @property
    def full_untruncated_fill_ids(self):
        return self.origin_input_ids + self.output_ids

    def finished(self):
        return self.is_finished

    def refresh_fill_ids(self):
        pass

    def owned_kv_len(self):
        return self.owned


class CountedSamples:
    """Metrics in plain numbers: counters and histograms summed, gauges as they were set last."""

    def __init__(self):
        self.values = {}

    def record(self, samples):
        for metric, labels, value in samples:
            key = (metric.name, *labels)
            is_gauge = metric.kind is MetricKind.GAUGE
            self.values[key] = value if is_gauge else self.values.get(key, 0) + value

    def __getitem__(self, key):
        return self.values.get(key if isinstance(key, tuple) else (key,), 0)


def reuse_over(books, loader, planner, config, clock, recomputer=None, refusal=""):  # noqa: PLR0917
    """What `backend` makes of these."""
    repairs = Repairs(books, PolicyPasses(books.log, recomputer), refusal)
    publishing = Publishing(books, repairs)
    promises = Promises(
        books=books, decisions=LoadDecisions(books, planner), repairs=repairs, publishing=publishing, fingerprint="model",
        repair_time=RepairTime(config.repair), clock=clock,
    )  # fmt: skip
    loading, ends = Loading(books, loader, config.min_run), Ends(books, repairs, planner.policy.name)
    return RequestReuse(
        books=books, promises=promises, loading=loading, repairs=repairs, publishing=publishing, ends=ends
    )


class World:
    """All parts of one scheduler's reuse on fakes."""

    def __init__(self, tmp_path, page_size=1, stores=(), weights="of today", ranks=None, **settings):
        generator = torch.Generator().manual_seed(0)
        self.keys = [torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(LAYERS)]
        self.values = [torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(LAYERS)]
        spec = RopeSpec(INV_FREQ, RopePairing.HALF)
        no_deadline = {"lookup_deadline_ms": 1e9}  # a busy machine must not turn matches into misses
        defaults = {"selection": "none", "phase_cost_tokens": 1, "donor_tokens": 1 << 15}
        self.config = SGLangConfig(**{**defaults, **no_deadline, **settings})
        self.tree = FakeTree(page_size)
        self.pool = KVBuffers(self.keys, self.values, [spec] * LAYERS)
        self.keeper = DonorKeeper(self.tree, self.pool, self.config, secret=bytes(32))
        costs = CostModel.of_width(64, per_phase=1, recompute_ratio=0.0)
        self.weights, self.now = weights, 0.0
        ranks = Ranks() if ranks is None else ranks
        self.link = self.make_link(stores, ranks, costs) if stores else None
        self.planner = LoadPlanner(self.keeper, self.config, costs, page_size, stores=self.link)
        self.log = RequestLog(CountedSamples(), str(tmp_path / "reports.jsonl"))
        continuations = Continuations(self.tree, page_size, self.config.min_run, self.pool.num_slots)
        loader = Loader(self.tree, self.pool, self.keeper, continuations, ranks=ranks, log=self.log)
        books = Books(
            keeper=self.keeper,
            continuations=continuations,
            request_texts=RequestTexts(self.tree, self.keeper, continuations, min_run=self.config.min_run),
            ranks=ranks,
            log=self.log,
            stores=None if self.link is None else StoreUse(self.link, self.log, lambda: self.now),
        )
        self.reuse = reuse_over(books, loader, self.planner, self.config, lambda: self.now)
        self.tree.on_evicted = self.reuse.publishing.evicted

    def make_link(self, stores, ranks, costs):
        layout, room = self.pool.row_layout(), self.config.host_bytes
        link = StoreLink(
            stores,
            self.keeper,
            ranks,
            layout=layout,
            costs=costs,
            weights=lambda: self.weights,
            host_bytes=room,
            clock=lambda: self.now,
        )
        link.open()
        return link

    def publish(self, rid, tokens, **names):
        """A request that computed everything itself and finished."""
        req = FakeRequest(rid, tokens, **names)
        self.reuse.promises.promise(req, tokens, len(tokens) - 1, 0)
        page = self.tree.page_size
        req.kv.cache_protected_len = len(tokens) // page * page
        slots = self.tree.allocate(req.kv.cache_protected_len)
        node = self.tree.insert(tokens[: req.kv.cache_protected_len], slots, **names)
        req.is_finished = True
        self.now += 1.0
        self.reuse.publishing.published(req, node)
        self.reuse.ends.released(req)
        self.reuse.publishing.settle()  # its answer was sent
        return node

    def conserved(self, private=0):
        held = sum(len(slots) for _, slots in self.tree.paths.values())
        assert len(self.tree.free_slots) + held + private == SLOTS - 1
        assert not self.tree.pins


@pytest.fixture
def make_world(tmp_path):
    return lambda **settings: World(tmp_path, **settings)


@pytest.fixture
def make_tokens(rng):
    return lambda count: array("q", rng.integers(3, 30_000, count).tobytes())
