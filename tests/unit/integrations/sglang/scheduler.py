"""A scheduler without an engine: SGLang's calls to its cache in its order, on pages whose K/V know where they come from.

Every slot holds the number of a `Content` in its value, and its position as the angle of its key. Nothing that is asserted
here is taken from what the code under test believes of a request.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from tests.unit.integrations.sglang.conftest import CountedSamples, FakeRequest, reuse_over

from kvgraft.config.sglang import SGLangConfig
from kvgraft.donors import CostModel
from kvgraft.errors import StoreError
from kvgraft.graft.drift import drift_correction
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.integrations.sglang.donors.continuations import Continuations
from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
from kvgraft.integrations.sglang.donors.loader import Loader
from kvgraft.integrations.sglang.donors.ranges import subtract
from kvgraft.integrations.sglang.donors.request_texts import RequestTexts
from kvgraft.integrations.sglang.donors.texts import UNKNOWN, HostBlockKV
from kvgraft.integrations.sglang.donors.tree import Resident
from kvgraft.integrations.sglang.planning.planner import LoadPlanner, chosen_policy
from kvgraft.integrations.sglang.planning.ranks import Ranks
from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
from kvgraft.integrations.sglang.recompute.slot_attention import Recomputation
from kvgraft.integrations.sglang.reporting.reports import RequestLog
from kvgraft.integrations.sglang.requests.books import Books
from kvgraft.integrations.sglang.requests.store_use import StoreUse
from kvgraft.integrations.sglang.stored.link import StoreLink
from kvgraft.memory.store.record import DonorRecord
from kvgraft.reuse.stored import is_stored
from kvgraft.types import Fidelity

SLOTS = 900
STEP = 1 / 128
"""Angle per position: no two positions of a pool of this size have the same."""


@dataclass(frozen=True)
class Content:
    """What a forward pass computed for one token.

    Attributes:
        token: Its id.
        position: Where it was computed.
        tenant: Of the request.
        text: All tokens up to this one.
        prefix: As `text` if its K/V are those of a full prefill, else None.
        generation: 0, or one more than the highest of the copies that it attended to.
        weights: Of which weights it and everything that it attended to are.
    """

    token: int
    position: int
    tenant: str
    text: tuple
    prefix: tuple | None
    generation: int
    weights: frozenset


@dataclass(eq=False)
class Page:
    parent: object
    tokens: tuple
    slots: list
    children: dict = field(default_factory=dict)
    locks: int = 0
    used_at: int = 0


def generation_after(seen, tokens):
    """The highest generation of `(position, content)` in a row: what was computed after other text is a copy."""
    return max((each.generation + (each.text != tuple(tokens[: at + 1])) for at, each in seen), default=0)


class PageTree:
    """`DonorTree` page by page, with what SGLang's cache does besides."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.free_slots = list(range(1, SLOTS // page_size * page_size))
        self.free_slots = self.free_slots[page_size - 1 :]  # whole pages; the first one is padding
        self.total = len(self.free_slots)
        self.roots, self.pins, self.on_evicted, self.is_full = {}, 0, None, False
        self.now = 0

    def used(self, node):
        """The pages of a path count as used, the last of them first to go."""
        for page in reversed(self.path(node)):
            self.now += 1
            page.used_at = self.now

    def match(self, name, tokens, end):
        node = self.roots.setdefault(name, Page(None, (), []))
        length = 0
        while length + self.page_size <= end:
            child = node.children.get(tuple(tokens[length : length + self.page_size]))
            if child is None:
                break
            node, length = child, length + self.page_size
        return length, node

    def resident(self, text, end):
        end = min(len(text.tokens), -(-end // self.page_size) * self.page_size)
        return Resident(*self.match((text.extra_key, text.cache_salt), text.tokens, end))

    def touch(self, text, end):
        self.used(self.resident(text, end).node)

    def path(self, node):
        pages = []
        while node.parent is not None:
            pages.append(node)
            node = node.parent
        return pages[::-1]

    def lock(self, node, by=1):
        for page in self.path(node):
            page.locks += by
            assert page.locks >= 0

    def pin(self, node):
        self.pins += 1
        self.lock(node)
        return node

    def unpin(self, pin):
        self.pins -= 1
        self.lock(pin, -1)

    def slots(self, node):
        return torch.tensor([slot for page in self.path(node) for slot in page.slots], dtype=torch.int64)

    def pages(self):
        found, left = [], list(self.roots.values())
        while left:
            node = left.pop()
            found += [node] if node.parent is not None else []
            left += node.children.values()
        return found

    def evict(self, num_tokens):
        freed = []
        while sum(map(len, freed)) < num_tokens:
            leaves = [page for page in self.pages() if not page.children and not page.locks]
            if not leaves:
                break
            leaf = min(leaves, key=lambda page: page.used_at)
            del leaf.parent.children[leaf.tokens]
            freed.append(leaf.slots)
        for slots in freed:
            self.free_slots += slots
        if freed:
            self.on_evicted([torch.tensor(slots) for slots in freed])

    def allocate(self, num_tokens):
        assert num_tokens % self.page_size == 0
        if self.is_full:
            return None
        self.evict(num_tokens - len(self.free_slots))
        if len(self.free_slots) < num_tokens:
            return None
        taken, self.free_slots = self.free_slots[:num_tokens], self.free_slots[num_tokens:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots):
        self.free_slots += slots.tolist() if isinstance(slots, torch.Tensor) else slots

    def adopt(self, text, slots, known):
        _, had = self.insert((text.extra_key, text.cache_salt), text.tokens, slots.tolist())
        assert len(had) * self.page_size == known

    def empty(self):
        self.evict(self.total)

    def insert(self, name, tokens, slots):
        """Insert whole pages; returns the node and what the tree had already, as `(start, its slots)`."""
        node, known = self.roots.setdefault(name, Page(None, (), [])), []
        for start in range(0, len(slots), self.page_size):
            page = tuple(tokens[start : start + self.page_size])
            if page in node.children:
                known.append((start, node.children[page].slots))
            else:
                node.children[page] = Page(node, page, slots[start : start + self.page_size])
            node = node.children[page]
        self.used(node)
        return node, known

    def room(self):
        return len(self.free_slots) + sum(len(page.slots) for page in self.pages() if not page.locks)


def tree_of(scheduler):
    """All that decides what SGLang's tree finds and evicts; names of our own differ by rank."""
    pages = sorted(scheduler.tree.pages(), key=lambda page: page.used_at)
    return [(page.tokens, tuple(page.slots), page.locks, page.used_at) for page in pages], list(
        scheduler.tree.free_slots
    )


def order_of(scheduler):
    """What is left of `tree_of` where a tree did not take a text: later ones lie in slots of other numbers there."""
    pages, free = tree_of(scheduler)
    return [(tokens, locks) for tokens, _, locks, _ in pages], len(free)


class Running:
    """What a scheduler knows of a request: its row, and what was copied into it."""

    def __init__(self, req):
        self.req, self.row, self.copied, self.prefix_len, self.node, self.wanted = req, [], set(), 0, None, []
        self.num_loaded = self.num_exact = 0  # tokens, and those of them whose K/V are a full prefill's
        self.attempts, self.has_drawn = [], False
        self.repaired_at = None  # tokens drawn by the last pass over chosen rows


class Scheduler:
    """Drives `RequestReuse` as `GraftRadixCache` does, request by request, and keeps an account of its own."""

    def __init__(self, page_size=1, recomputes=False, shelf=None, contents=None, weights=0, *, ranks=None, **settings):
        self.page_size, self.shelf, self.now = page_size, shelf, 0.0
        self.contents, self.weights = [None] if contents is None else contents, weights
        self.settings = settings
        self.config = SGLangConfig(
            **{
                "selection": "first_k",
                "donor_tokens": 1 << 12,
                "host_bytes": 120 * 16,
                "lookup_deadline_ms": 1e9,
                **settings,
            }
        )
        self.keys, self.values = torch.zeros(SLOTS, 1, 2), torch.zeros(SLOTS, 1, 2)
        self.tree = PageTree(page_size)
        self.buffers = KVBuffers([self.keys], [self.values], [RopeSpec(torch.tensor([STEP]), RopePairing.HALF)])
        self.keeper = DonorKeeper(self.tree, self.buffers, self.config, secret=bytes(32))
        self.log = RequestLog(CountedSamples())
        ranks, costs = ranks or Ranks(), CostModel.of_width(64, per_phase=1, recompute_ratio=0.0)
        ranks.keeper = self.keeper
        recomputer = self.recomputer(ranks) if recomputes else None
        continuations = Continuations(self.tree, page_size, self.config.min_run, SLOTS)
        loader = Loader(self.tree, self.buffers, self.keeper, continuations, ranks=ranks, log=self.log)
        self.link = None if shelf is None else self.make_link(shelf, ranks, costs)
        books = Books(
            keeper=self.keeper,
            continuations=continuations,
            request_texts=RequestTexts(self.tree, self.keeper, continuations, min_run=self.config.min_run),
            ranks=ranks,
            log=self.log,
            stores=None if self.link is None else StoreUse(self.link, self.log, lambda: self.now),
        )
        planner = LoadPlanner(self.keeper, self.config, costs, page_size, recomputer=recomputer, stores=self.link)
        refusal = "" if recomputes else "no passes"
        self.reuse = reuse_over(books, loader, planner, self.config, lambda: self.now, recomputer, refusal)
        self.tree.on_evicted = self.reuse.publishing.evicted
        self.is_stale, self.number, self.may_lack_reports = False, 0, False
        self.waiting, self.running, self.copied_tokens, self.recomputed_tokens = [], [], 0, 0
        self.repaired_after = self.continued_tokens = self.named_sources = 0
        self.finished = deque(maxlen=4)  # the last ones, as (tokens, tenant)
        self.had = defaultdict(list)  # contents by position of all that ended, by id and attempt: ids may come again

    # What SGLang does

    def submit(self, tokens, tenant, rid, repair="after"):
        sampling = SimpleNamespace(custom_params={"kvgraft_repair": repair}, max_new_tokens=1000, regex=None, ebnf=None)
        req = FakeRequest(rid, array("q", tokens), cache_salt=tenant or None, sampling_params=sampling)
        self.waiting.append(Running(req))

    def match(self, entry):
        """Match with a limit, as in every round, and look up again, as before an admission; returns what is promised."""
        tokens = entry.req.full_untruncated_fill_ids
        end = len(tokens) - 1
        name = (entry.req.extra_key, entry.req.cache_salt)
        entry.prefix_len, entry.node = self.tree.match(name, tokens, end)
        self.tree.used(entry.node)
        entry.req.prefix_len = entry.prefix_len
        promised = self.reuse.promises.promise(entry.req, tokens, end, entry.prefix_len, may_keep=True)
        if not self.reuse.promises.awaits(entry.req, may_nap=False):
            again = self.reuse.promises.promise_again(entry.req)
            promised = promised if again is None else again
        if not self.reuse.promises.awaits(entry.req, may_nap=False):
            return promised
        assert promised == 0
        for span in self.reuse.books.requests[entry.req].reads.spans:
            assert span.read.wait(60)
        promised = self.reuse.promises.promise(entry.req, tokens, end, entry.prefix_len)
        assert not self.reuse.promises.awaits(entry.req, may_nap=False), "a request waits once"
        return promised

    def admit(self, entry, chunk):
        """Match, load what was promised and compute the first chunk; False where there is no room."""
        promised = self.match(entry)
        req = entry.req
        self.tree.lock(entry.node)
        if self.tree.room() < len(req.full_untruncated_fill_ids) + 2 * self.page_size:
            self.tree.lock(entry.node, -1)
            return False
        self.waiting.remove(entry)
        self.running.append(entry)
        entry.row, entry.copied = self.tree.slots(entry.node).tolist(), set()
        entry.num_loaded = entry.num_exact = 0
        req.kv.cache_protected_len, req.kv.req_pool_idx = entry.prefix_len, 1
        if promised:
            loaded = self.reuse.loading.load_first(req, promised)
            assert loaded in (0, promised)
            for slots in self.reuse.loading.private_slots(req):
                self.take_copies(entry, slots)
            req.prefix_len = len(entry.row)
            assert len(entry.row) == entry.prefix_len + loaded
            self.check_sources(entry)
            self.recompute(entry)
        self.compute_chunk(entry, chunk)
        return True

    def go_on(self, entry, chunk):
        """Checkpoint, load and compute the next chunk."""
        req = entry.req
        self.checkpoint(entry)
        slots = self.reuse.loading.load_next(req, self.tree.room() - len(req.full_untruncated_fill_ids))
        if slots is not None:
            self.take_copies(entry, slots)
            req.prefix_len = len(entry.row)
        self.recompute(entry)
        if self.tree.room() < len(req.full_untruncated_fill_ids) - len(entry.row) + 2 * self.page_size:
            self.retract(entry)
            return
        self.compute_chunk(entry, chunk)

    def decode(self, entry, token):
        """Choose a token; the K/V of the one before it are computed on the way, after a repair that is due."""
        if entry.has_drawn:
            for req in self.reuse.repairs.due([entry.req]):
                self.recomputed_of = entry
                self.reuse.repairs.repair(req, torch.tensor(entry.row, dtype=torch.int32))
        self.compute(entry, len(entry.req.full_untruncated_fill_ids))
        entry.req.output_ids.append(token)
        entry.has_drawn = True

    def finish(self, entry):
        entry.req.is_finished, entry.req.owned = True, len(entry.row)
        row = torch.tensor(entry.row, dtype=torch.int32)
        self.reuse.publishing.adopt_computed(entry.req, row, entry.node)
        if not entry.req.skip_radix_cache_insert:
            self.checkpoint(entry)
        self.release(entry)
        self.finished.append((entry.req.full_untruncated_fill_ids.tolist(), entry.req.cache_salt or ""))
        found = self.log.take(entry.req)
        if found is not None or not self.may_lack_reports:
            self.check_entry(entry, found)

    def retract(self, entry):
        self.release(entry)
        entry.req.kv.cache_protected_len = entry.req.prefix_len = 0
        self.waiting.append(entry)

    def abort(self, entry):
        self.reuse.ends.aborted(entry.req.cache_request_handle)
        if entry in self.running:
            entry.req.is_finished = True
            self.release(entry)
        else:
            self.waiting.remove(entry)

    def flush(self):
        if self.running:
            return
        for page in self.tree.pages():
            self.tree.free_slots += page.slots
        self.tree.roots.clear()
        self.reuse.books.clear()
        self.is_stale = False

    def change_weights(self):
        self.reuse.books.weights_change()
        self.weights += 1

    def rest(self):
        """Nothing is computed for so long that everything is written and told of that is to be."""
        while not self.link._behind.is_idle:
            self.reuse.idle()
        assert all(opened.writer.flush(60) for opened in self.link._used)
        with contextlib.suppress(StoreError):  # one that is in trouble tells nothing new
            assert all(opened.feed.look(60) for opened in self.link._used)
        for _ in range(4):
            self.reuse.idle()

    def restarted(self, weights):
        """Another process of the same server; what this one has not written is gone."""
        self.link.close(weights_change=True)
        passes = self.reuse.repairs.passes.recomputer is not None
        return Scheduler(self.page_size, passes, self.shelf, self.contents, weights, **self.settings)

    # Its parts

    def make_link(self, shelf, ranks, costs):
        link = StoreLink(
            (shelf,),
            self.keeper,
            ranks,
            layout=self.buffers.row_layout(),
            costs=costs,
            weights=lambda: str(self.weights),
            host_bytes=self.config.host_bytes,
            clock=lambda: self.now,
        )
        link.open()
        return link

    def recomputer(self, ranks):
        model, policy = SimpleNamespace(run=self.run_rows), chosen_policy(self.config)
        return Recomputer(model, self.buffers, policy, drift_correction(self.config.correction), ranks)

    def recompute(self, entry):
        self.recomputed_of = entry
        self.reuse.repairs.recompute(entry.req, torch.tensor(entry.row, dtype=torch.int64))

    def run_rows(self, token_ids, rows, attention):
        """What SGLang's model does in a pass of ours: contents instead of K/V."""
        entry, numbers = self.recomputed_of, []
        before = list(enumerate(self.contents_of(entry.row)))  # what the pass computes is written at its end
        for token, row in zip(token_ids.tolist(), rows.tolist(), strict=True):
            tokens = tuple(entry.req.full_untruncated_fill_ids)
            seen = before[:row]
            generation = generation_after(seen, tokens)
            weights = frozenset({self.weights}.union(*(each.weights for _, each in seen)))
            content = Content(token, row, entry.req.cache_salt or "", tokens[: row + 1], None, generation, weights)
            self.contents.append(content)
            numbers.append(len(self.contents) - 1)
        values = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
        angles = torch.from_numpy(STEP * rows)
        keys = torch.stack([angles.cos(), angles.sin()], 1)[:, None].float()
        layer = SimpleNamespace(layer_id=0, tp_q_head_num=1, head_dim=2, scaling=1.0, logit_cap=0.0)
        attention.forward(keys.flatten(1), keys, values, layer, None)
        if attention.failure is not None:
            raise attention.failure
        if isinstance(attention, Recomputation):
            entry.copied -= set(rows.tolist())
            self.recomputed_tokens += len(rows)
            entry.repaired_at = len(entry.req.output_ids)
            self.repaired_after += entry.has_drawn

    def compute_chunk(self, entry, chunk):
        tokens, position = entry.req.full_untruncated_fill_ids, len(entry.row)
        end = min(len(tokens), position + chunk)
        gap = self.reuse.loading.next_gap(entry.req, position)
        if gap is not None:
            end = min(end, position + gap)
        if end < len(tokens):
            end = end // self.page_size * self.page_size or self.page_size
        self.compute(entry, max(end, position))
        entry.req.prefix_len = len(entry.row)

    def compute(self, entry, end):
        tokens = entry.req.full_untruncated_fill_ids
        missing = -(-end // self.page_size) - -(-len(entry.row) // self.page_size)
        spare = entry.wanted
        if missing > 0:
            got = self.tree.allocate(missing * self.page_size)
            assert got is not None
            spare += got.tolist()
        seen = list(enumerate(self.contents_of(entry.row)))
        exact = all(each.prefix == tuple(tokens[: at + 1]) for at, each in seen)
        generation = generation_after(seen, tokens)
        weights = frozenset({self.weights}.union(*(each.weights for _, each in seen)))
        while len(entry.row) < end:
            position, slot = len(entry.row), spare.pop(0)
            text = tuple(tokens[: position + 1])
            tenant = entry.req.cache_salt or ""
            prefix = text if exact else None
            self.contents.append(Content(tokens[position], position, tenant, text, prefix, generation, weights))
            self.values[slot] = len(self.contents) - 1
            self.keys[slot, 0] = torch.tensor([np.cos(STEP * position), np.sin(STEP * position)])
            entry.row.append(slot)

    def take_copies(self, entry, slots):
        for slot in slots.tolist():
            content = self.content(slot)
            assert content.tenant == (entry.req.cache_salt or ""), "a copy of another tenant's"
            assert content.weights == {self.weights}, "a copy of what other weights computed"
            entry.copied.add(len(entry.row))
            entry.row.append(slot)
            entry.num_exact += content.prefix == tuple(entry.req.full_untruncated_fill_ids[: len(entry.row)])
        entry.num_loaded += len(slots)
        self.copied_tokens += len(slots)

    def checkpoint(self, entry):
        req, page = entry.req, self.page_size
        if req.skip_radix_cache_insert:
            return
        whole = len(entry.row) // page * page
        name = (req.extra_key, req.cache_salt)
        node, known = self.tree.insert(name, req.full_untruncated_fill_ids, entry.row[:whole])
        for start, slots in known:
            if start >= req.kv.cache_protected_len:
                self.tree.free(entry.row[start : start + page])
                entry.row[start : start + page] = slots
        self.tree.lock(node)
        self.tree.lock(entry.node, -1)
        entry.node, req.kv.cache_protected_len = node, whole
        self.reuse.publishing.published(req, node)

    def release(self, entry):
        req = entry.req
        self.had[req.rid, len(entry.attempts)].append(self.contents_of(entry.row))
        ranges = subtract([(req.kv.cache_protected_len, len(entry.row))], self.reuse.publishing.adopted(req))
        for start, stop in ranges:
            self.tree.free(entry.row[start:stop])
        self.tree.free(entry.wanted)
        self.tree.lock(entry.node, -1)
        entry.attempts.append((entry.prefix_len, entry.num_exact, len(entry.copied), entry.repaired_at))
        entry.repaired_at = None
        self.running.remove(entry)
        self.reuse.ends.released(req)
        entry.row, entry.wanted, entry.has_drawn, req.kv.req_pool_idx = [], [], False, None

    def content(self, slot):
        return self.contents[int(self.values[slot, 0, 0])]

    def contents_of(self, slots):
        """`content` of many slots; one call of torch."""
        return [self.contents[int(number)] for number in self.values[list(slots), 0, 0].tolist()]

    # What must hold

    def check_sources(self, entry):
        """A request that is named as the source of what another goes on from had the same K/V."""
        state = self.reuse.books.requests[entry.req]
        for span, source in zip(state.lineage.spans, state.sources, strict=True):
            if span.fidelity is not Fidelity.CONTINUED or source["request"] == UNKNOWN:
                continue
            self.named_sources += 1
            start = source["position"]
            own = self.contents_of(entry.row[span.target_start : span.target_start + span.length])
            known = self.had[source["request"], source["attempt"]]
            assert any(
                all(a is b for a, b in zip(own, had[start : start + span.length], strict=True))
                for had in known
                if len(had) >= start + span.length
            ), f"{source['request']} did not have {span.length} tokens at {span.target_start} with these K/V"

    def check(self):
        self.check_tree()
        self.check_rows()
        self.check_donors()
        self.keeper.check()
        held = sum(len(page.slots) for page in self.tree.pages())
        private = sum(len(entry.row) - entry.req.kv.cache_protected_len + len(entry.wanted) for entry in self.running)
        assert sorted({*self.tree.free_slots}) == sorted(self.tree.free_slots), "a slot was freed twice"
        assert len(self.tree.free_slots) + held + private == self.tree.total, "slots were lost"
        assert self.tree.pins == 0, "donors stay pinned"
        assert self.reuse.books.num_requests <= len(self.waiting) + len(self.running)
        assert self.may_lack_reports or self.log.num_errors == self.log.metrics["graft_errors"]

    def check_tree(self):
        """No request can ask for anything but what a full prefill computes; a name of our own is one tenant's."""
        for (extra_key, salt), root in self.tree.roots.items():
            left, tenants = [(child, ()) for child in root.children.values()], set()
            while left:
                page, tokens = left.pop()
                for token, slot in zip(page.tokens, page.slots, strict=True):
                    tokens += (token,)
                    content = self.content(slot)
                    assert content.token == token
                    tenants.add(content.tenant)
                    if extra_key is None:
                        assert content.prefix == tokens, "approximate K/V under a name that a request can ask for"
                        assert content.tenant == (salt or "")
                left += [(child, tokens) for child in page.children.values()]
            assert len(tenants) <= 1

    def check_rows(self):
        for entry in self.running:
            tokens = entry.req.full_untruncated_fill_ids
            assert [each.token for each in self.contents_of(entry.row)] == list(tokens[: len(entry.row)])
            cosines, sines = self.keys[entry.row, 0].unbind(-1)
            turn = 2 * np.pi / STEP
            error = torch.atan2(sines, cosines) / STEP - torch.arange(len(entry.row))
            error = (error + turn / 2) % turn - turn / 2  # rows are longer than half a turn
            assert not len(error) or float(error.abs().max()) < 0.5, "a key that was rotated to another position"
            assert bool(entry.copied) <= bool(entry.req.skip_radix_cache_insert)

    def check_donors(self):
        """A donor's K/V were computed by these weights, where it says, behind nothing of a higher generation than it says."""
        for donor in self.keeper.catalogue:
            if is_stored(donor):
                assert donor.kv.key == DonorRecord.of(donor).key
                continue
            if isinstance(donor.kv, HostBlockKV):
                block = self.keeper.in_host(donor, 0, donor.num_tokens)
                numbers = block.values[0][:, 0, 0].tolist()
            else:
                text, first = donor.kv.text, donor.kv.offset
                found = self.tree.resident(text, first + donor.num_tokens)
                slots = self.tree.slots(found.node)[first : first + donor.num_tokens]
                numbers = self.values[slots, 0, 0].tolist()
            for index, number in enumerate(numbers):
                content = self.contents[int(number)]
                assert content.token == donor.token_ids[index]
                assert content.position == donor.start_position + index, "a copy became a donor"
                assert content.generation <= donor.generation, "a donor of too low a generation"
                assert content.weights == {self.weights}, "a donor that other weights computed"

    def check_entry(self, entry, found):
        told = entry.attempts
        if self.may_lack_reports and len(found["attempts"]) < len(told):
            unknown = len(told) - len(found["attempts"])
            assert not any(num_copied for _, _, num_copied, _ in told[:unknown]), "what was copied is not reported"
            told = told[unknown:]
        for attempt, (prefix_len, num_exact, num_copied, repaired_at) in zip(found["attempts"], told, strict=True):
            reused = attempt["exact_tokens"] + attempt["continued_tokens"] + attempt["shifted_tokens"]
            is_more = self.may_lack_reports and reused > prefix_len + num_copied
            assert is_more or reused == prefix_len + num_copied, "what is reused is not what is reported"
            assert prefix_len <= attempt["exact_tokens"], "what the exact tree gave is no longer called exact"
            assert attempt["exact_tokens"] <= prefix_len + num_exact, "approximate K/V are called exact"
            if (
                self.reuse.repairs.passes.recomputer is not None
                and attempt["shifted_tokens"] + attempt["recomputed_tokens"]
            ):
                from_token = (attempt["repair"] or {}).get("from_token")
                repaired_from = None if repaired_at is None else 1 + repaired_at
                is_unknown = self.may_lack_reports and from_token is None
                assert is_unknown or from_token == repaired_from, "the repair is not the one that is reported"
        report = found["report"]
        for attempt in found["attempts"]:
            at_a_cost = [told["shifted_tokens"] + told["continued_tokens"] for told in (report, attempt)]
            assert at_a_cost[0] >= at_a_cost[1], "a retraction made the report better"
            assert attempt["recomputed_tokens"] <= attempt["computed_tokens"]
            assert attempt["recomputed_tokens"] == 0 or attempt["spans"]
            reused = attempt["exact_tokens"] + attempt["continued_tokens"] + attempt["shifted_tokens"]
            assert reused + attempt["computed_tokens"] == attempt["num_tokens"]
            self.continued_tokens += attempt["continued_tokens"]
        assert report["exact_tokens"] == min(attempt["exact_tokens"] for attempt in found["attempts"])
