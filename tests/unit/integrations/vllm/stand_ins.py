"""vLLM's side of the connector, reduced to what decides lineage: requests, a block cache, steps, and workers' books.

K/V are a `Truth`: how far from a full prefill they are, and which model computed them. The books are kept position by
position, without `kvgraft.reuse.lineage`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

from kvgraft.integrations.vllm.messages import ReadCost, StoreReport, WorkerReport
from kvgraft.integrations.vllm.scheduler.private_hashes import is_private
from kvgraft.memory.store.record import StoreNews
from kvgraft.reuse.outcome import GraftOutcome

BLOCK = 48
"""Longer than the shortest reused run, so that a graft may begin in a prompt's last, partial block."""


class Truth(NamedTuple):
    """`depth` 0 is exact; copied to another place is one more than its donor; computed is the highest that was attended to.

    `text` stands for the tokens up to and with its own: behind the very same, it is no worse than it was.
    """

    depth: int
    epoch: int
    copied: bool = False
    text: bytes = b""
    token: int = -1

    def at(self, text, token):
        """A copy of it as the last token, `token`, of `text`."""
        assert token == self.token, "K/V of another token are grafted"
        return self if self.text == text else Truth(self.depth + 1, self.epoch, copied=True, text=text, token=token)


@dataclass(eq=False, repr=False)
class Request:
    """What the connector reads of vLLM's request, hashes of blocks as vLLM makes them, and the driver's own notes."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict | None
    max_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    all_token_ids: list[int] = field(default_factory=list)
    cache_salt = None
    lora_request = None
    prompt_embeds = None
    sampling_params = None
    mm_features: tuple = ()
    skip_reading_prefix_cache = False
    computed: int = 0
    found: int = 0
    kv: list[Truth] = field(default_factory=list)
    waits: bool = False
    is_new: bool = True
    worst_copied: int = 0
    least_exact: int = 10**9
    texts: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.extend(self.prompt_token_ids)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self):
        return self.computed

    @property
    def num_prompt_tokens(self):
        return len(self.prompt_token_ids)

    def text(self, stop):
        """Stands for the tokens in front of `stop`."""
        for token in self.all_token_ids[len(self.texts) : stop]:
            self.texts.append(chained((self.texts or [b""])[-1], [token]))
        return self.texts[stop - 1]

    def extend(self, tokens):
        self.all_token_ids += tokens
        new = []
        for start in range(len(self.block_hashes) * BLOCK, self.num_tokens - BLOCK + 1, BLOCK):
            parent = ([*self.block_hashes, *new] or [b"root"])[-1]
            new.append(chained(parent, self.all_token_ids[start : start + BLOCK]))
        self.block_hashes.extend(new)


def chained(parent, tokens):
    return hashlib.sha256(parent + repr(list(tokens)).encode()).digest()


def public_hashes(tokens):
    hashes = [b"root"]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(chained(hashes[-1], tokens[start : start + BLOCK]))
    return hashes[1:]


class Shelf:
    """A store that processes share: per space, which is an epoch, records and truths by key."""

    name = "shelf"

    def __init__(self):
        self.spaces = {}
        self.touched = []

    def put(self, epoch, record, truths):
        self.spaces.setdefault(f"{epoch:02x}", {}).setdefault(record.key, (record, truths))

    def get(self, epoch, key):
        return self.spaces.get(f"{epoch:02x}", {}).get(key, (None, None))[1]

    def touch(self, space, keys):
        self.touched += [(space, key) for key in keys]

    def close(self):
        pass


class ShelfFeed:
    """What `StoreFeed` tells, without a thread."""

    def __init__(self, shelf, spaces):
        self.shelf, (self.space,), self.told = shelf, spaces, set()

    def news(self):
        present = self.shelf.spaces.get(self.space, {})
        added = tuple(present[key][0] for key in present.keys() - self.told)
        removed = tuple(self.told - present.keys())
        self.told = set(present)
        return StoreNews(added, removed)

    def forget(self, keys):
        self.told -= set(keys)

    def close(self):
        pass


class Workers:
    """Carries commands out on truths. `fate` says what becomes of the next grafts and captures."""

    def __init__(self, engine):
        self.engine = engine
        self.epoch = 0
        self.texts, self.donors, self.dead = {}, {}, set()
        self.jobs = {}
        self.kept = {}  # texts that grafts under way will capture
        self.unrepaired, self.repairs = {}, {}
        self.outcomes, self.lost_texts, self.lost_donors = {}, set(), set()
        self.num_changes = 0
        self.promoted, self.unpromoted, self.unreadable = set(), set(), set()
        self.told_space = None

    def load(self, commands):
        engine = self.engine
        if commands.reset:
            self.forget()
            self.epoch, self.told_space = engine.epoch, None
        works = commands.grafts or commands.seals or commands.captures or commands.repairs or self.jobs
        if works and self.epoch != engine.epoch:
            self.forget()
            self.epoch = engine.epoch
            self.num_changes += 1
        for request_id in commands.cancels:
            given_up = self.jobs.pop(request_id, None)
            if given_up is not None:
                self.unpromote(given_up[0])
            self.unrepaired.pop(request_id, None)
        for seal in commands.seals:
            self.seal(seal.text_id, seal.donor_id)
        for graft in commands.grafts:
            self.jobs[graft.request_id] = graft, [self.donors.get(span.donor_id) for span in graft.spans]
            self.kept |= dict.fromkeys((text_id for text_id, _, _ in graft.captures), True)
        for text_id in commands.discards:
            self.texts.pop(text_id, None)
            self.dead.discard(text_id)
            self.kept.pop(text_id, None)
        for donor_id in commands.drops:
            self.donors.pop(donor_id, None)
        self.work(commands)

    def work(self, commands):
        for graft, donors in list(self.jobs.values()):
            if not graft.asynchronous or self.engine.fate != "slow":
                del self.jobs[graft.request_id]
                self.run(graft, donors)
        for repair in commands.repairs:
            self.repair(repair)

    def repair(self, command):
        """Choose nothing, but see to it that everything is there that could be chosen from."""
        request = self.engine.requests[command.request_id]
        if self.unrepaired.pop(command.request_id, None) is None:
            self.repairs[command.request_id] = GraftOutcome((), 0.0, 0.0, "gone", failed=True, is_gone=True)
            return
        assert self.epoch == self.engine.epoch, "K/V of a model that is gone are repaired"
        assert len(request.kv) >= request.num_prompt_tokens
        assert len(command.block_ids[0]) * BLOCK >= request.num_prompt_tokens
        self.repairs[command.request_id] = GraftOutcome((), 1.0, 1.0)

    def run(self, graft, donors):
        engine, request = self.engine, self.engine.requests[graft.request_id]
        start = graft.plan.prefix_len
        fate = engine.fate
        read = {donor_id: engine.shelf.get(self.epoch, cold.key) for donor_id, cold in graft.stored.items()}
        self.unreadable |= {graft.stored[donor_id].key for donor_id, truths in read.items() if truths is None}
        if fate == "fails" or graft.void or None in read.values():
            self.fail(graft)
            return
        for donor_id, cold in graft.stored.items():
            if cold.is_promoted:
                self.donors[donor_id] = read[donor_id]
                self.promoted.add(donor_id)
        donors = [read.get(span.donor_id, donor) for span, donor in zip(graft.spans, donors, strict=True)]
        if fate == "falls back" or any(donor is None for donor in donors):
            engine.compute(request, start, graft.end)
            self.outcomes[graft.request_id] = GraftOutcome((), 0.0, 0.0, "a donor is gone")
        else:
            position = start
            for span, donor in zip(graft.spans, donors, strict=True):
                engine.compute(request, position, span.target_start)
                for truth in donor[span.donor_start : span.donor_start + span.length]:
                    assert truth.epoch == engine.epoch, "K/V of a model that is gone are grafted"
                    place = len(request.kv)
                    request.kv.append(truth.at(request.text(place + 1), request.all_token_ids[place]))
                position = span.target_end
            engine.compute(request, position, graft.end)
            self.outcomes[graft.request_id] = GraftOutcome((), 1.0, 1.0)
            if graft.repairs_after:
                self.unrepaired[graft.request_id] = graft
        for text_id, first, stop in graft.captures:
            if self.kept.pop(text_id, None):
                self.texts[text_id] = request.kv[first:stop]

    def fail(self, graft, *, is_gone=False):
        self.unpromote(graft)
        self.outcomes[graft.request_id] = GraftOutcome(
            (), 0.0, 0.0, "injected", failed=True, is_gone=is_gone or graft.is_gone
        )
        for text_id in (*(text_id for text_id, _, _ in graft.captures), graft.tail):
            if text_id is not None:
                self.lose(text_id)

    def unpromote(self, graft):
        self.unpromoted |= {donor_id for donor_id, cold in graft.stored.items() if cold.is_promoted}

    def save(self, commands):
        for capture in commands.captures:
            request = self.engine.of_capture[capture.text_id]
            if self.engine.fate == "loses text" or commands.known_changes < self.num_changes:
                self.lose(capture.text_id)
            elif capture.text_id not in self.dead:
                self.texts.setdefault(capture.text_id, []).extend(request.kv[capture.start : capture.stop])
            if capture.donor_id is not None:
                self.seal(capture.text_id, capture.donor_id)
        for write in commands.writes:
            if write.donor_id in self.donors:
                truths = self.donors[write.donor_id]
                assert len(truths) == write.record.num_tokens
                self.engine.shelf.put(self.epoch, write.record, truths)

    def seal(self, text_id, donor_id):
        if text_id in self.texts:
            self.donors[donor_id] = self.texts.pop(text_id)
        else:
            self.lost_donors.add(donor_id)
            self.dead.discard(text_id)

    def lose(self, text_id):
        self.lost_texts.add(text_id)
        self.dead.add(text_id)
        self.texts.pop(text_id, None)

    def forget(self):
        for graft, _ in list(self.jobs.values()):
            del self.jobs[graft.request_id]
            self.fail(graft, is_gone=True)
        self.dead |= set(self.texts)
        self.unrepaired = {}
        self.texts, self.donors = {}, {}

    def report(self):
        told = WorkerReport(
            self.outcomes,
            frozenset(self.lost_texts),
            frozenset(self.lost_donors),
            "",
            len(self.donors),
            self.num_changes,
            StoreReport(
                {0: f"{self.epoch:02x}"} if self.told_space != self.epoch else {},
                ReadCost(0.0, 0.0),
                frozenset(self.promoted),
                frozenset(self.unpromoted),
                frozenset(self.unreadable),
            ),
            repairs=self.repairs,
        )
        self.told_space = self.epoch
        self.promoted, self.unpromoted, self.unreadable = set(), set(), set()
        self.outcomes, self.repairs, self.lost_texts, self.lost_donors = {}, {}, set(), set()
        return told


class Books:
    """vLLM's manager where every block is computed before anyone finds it; `test_pending_blocks.py` asks the real one."""

    def __init__(self, engine):
        self.engine = engine
        self.block_pool = SimpleNamespace(get_cached_block=self.get_cached_block, evict_blocks=self.evict_named)

    def get_computed_blocks(self, request):
        return SimpleNamespace(blocks=([],)), len(self.engine.cached(request))

    def get_cached_block(self, block_hash, groups):
        return [SimpleNamespace(block_id=block_hash)] if block_hash in self.engine.cache else None

    def evict_named(self, block_hashes):
        for block_hash in block_hashes:
            del self.engine.cache[block_hash]

    def get_blocks(self, request_id):
        del request_id
        return SimpleNamespace(blocks=([],))

    def evict_blocks(self, block_ids):
        del block_ids


class Engine:
    """vLLM's scheduler, as far as the connector sees it."""

    def __init__(self, graft, shelf=None):
        self.graft = graft
        graft.bind(Books(self))
        self.shelf = shelf or Shelf()
        self.defers = False
        self.deferred = []
        self.epoch = 0
        self.fate = ""
        self.requests, self.running, self.waiting = {}, [], []
        self.cache = {}
        self.preempted = set()
        self.of_capture = {}
        self.told = []
        self.arrived = set()
        self.workers = Workers(self)

    def add(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def compute(self, request, start, stop):
        """A forward pass over positions `[start, stop)`; each attends to all in front of it."""
        assert len(request.kv) == start
        depth = max((truth.depth for truth in request.kv), default=0)
        oldest = min((truth.epoch for truth in request.kv), default=self.epoch)
        epoch = min(oldest, self.epoch)
        request.kv += [
            Truth(depth, epoch, text=request.text(position + 1), token=request.all_token_ids[position])
            for position in range(start, stop)
        ]

    def cached(self, request):
        """K/V of the longest run of blocks that the cache has, the last token left out."""
        kv = []
        for number in range((request.num_tokens - 1) // BLOCK):
            block = self.cache.get(request.block_hashes[number])
            if block is None:
                break
            is_public = not is_private(request.block_hashes[number])
            assert not (is_public and any(truth.depth for truth in block)), "a cache hit is approximate"
            kv += block
        accepts = (request.kv_transfer_params or {}).get("kvgraft", "graft") == "graft"
        assert accepts or not any(truth.depth for truth in kv), "copies reach a request that accepts none"
        for position, truth in enumerate(kv):
            assert truth.text == request.text(position + 1), "K/V are of another text"
        return kv

    def publish(self, request):
        known = public_hashes(request.all_token_ids)
        for number in range(min(request.computed, len(request.kv)) // BLOCK):
            block = request.kv[number * BLOCK : (number + 1) * BLOCK]
            if request.block_hashes[number] == known[number]:
                assert not any(truth.depth for truth in block), "approximate K/V become a prefix of anyone"
            self.cache[request.block_hashes[number]] = block

    def step(self, *, room, chunk):
        """Schedule, run workers, take their report, sample."""
        if not self.defers:
            self._drain()
        scheduled = {}
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
        new = []
        for request in [one for one in self.running if not one.waits]:
            count = min(chunk, request.num_tokens - request.computed)
            scheduled[request.request_id] = count
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(([],))
            cached.num_computed_tokens.append(request.computed)
        if not self.preempted:  # vLLM admits nobody in a step that preempts
            self._admit(room, chunk, scheduled, new, cached)
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={},
            preempted_req_ids=self.preempted,
        )
        self.preempted = set()
        for state in self.graft._attempts.running.values():
            self.of_capture |= {text.text_id: self.requests[state.request_id] for text in state.held.texts}
        commands = self.graft.commands(output)
        self.workers.load(commands)
        failed = {name for name, outcome in self.workers.outcomes.items() if outcome.failed}
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            is_repaired = request_id not in self.workers.unrepaired
            assert is_repaired or request.computed < request.num_prompt_tokens, "a token is drawn before its repair"
            if request_id not in failed:
                self.compute(request, request.computed, request.computed + count)
                request.computed += count
            else:
                request.kv += [Truth(99, -1)] * (request.computed + count - len(request.kv))  # garbage
        self.workers.save(commands)
        report = self.workers.report()
        for request_id in report.outcomes:
            self._end_of_graft(self.requests.get(request_id), failed=request_id in failed)
        for request_id in scheduled:
            if request_id not in failed:
                self._sample(self.requests[request_id])
        # vLLM asks for the reports of requests that end in the step before it hands this over.
        self.graft.receive(report)
        self._let_go_on()
        self._check_reports()

    def _let_go_on(self):
        arrived, self.arrived = self.arrived, set()
        for request_id in self.graft.loaded(arrived):
            self.requests[request_id].waits = False

    def output_of(self, requests):
        """A step that computes one more token of each."""
        cached = SimpleNamespace(
            req_ids=[request.request_id for request in requests],
            resumed_req_ids=set(),
            new_block_ids=[([],) for _ in requests],
            num_computed_tokens=[request.computed for request in requests],
        )
        return SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: 1 for request in requests},
            scheduled_spec_decode_tokens={},
            preempted_req_ids=set(),
        )

    def _admit(self, room, chunk, scheduled, new, cached):
        for request in list(self.waiting):
            local = self.cached(request)
            external, waits = self.graft.match(request, len(local))
            if external is None:
                continue
            assert external <= request.num_tokens - 1 - len(local)
            if not room:
                break
            self.waiting.remove(request)
            request.kv, request.found = local, len(local)
            blocks = (list(range(1, 200)),)
            if waits and self.defers:  # vLLM 0.33 with steps in flight
                self.deferred.append((request, blocks, external))
            else:
                self.graft.admit(request, blocks, external)
            request.computed, request.waits = len(local) + external, waits
            self.running.append(request)
            if not waits:
                scheduled[request.request_id] = min(chunk, request.num_tokens - request.computed)
                self._list(request, new, cached, blocks)

    def _drain(self):
        """`update_state_after_alloc` in a later step than the lookup; never for requests that ended meanwhile."""
        deferred, self.deferred = self.deferred, []
        for request, blocks, external in deferred:
            if request in self.running:
                self.graft.admit(request, blocks, external)

    def _list(self, request, new, cached, blocks):
        if request.is_new:
            request.is_new = False
            new.append(
                SimpleNamespace(req_id=request.request_id, block_ids=blocks, num_computed_tokens=request.computed)
            )
            return
        cached.req_ids.append(request.request_id)
        cached.resumed_req_ids.add(request.request_id)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(request.computed)

    def _end_of_graft(self, request, *, failed):
        if request is None or request not in self.running:
            return
        was_waiting, request.waits = request.waits, False
        if not failed:
            if was_waiting:
                request.waits = True
                self.arrived.add(request.request_id)
            request.computed = max(request.computed, len(request.kv) if was_waiting else 0)
            self.publish(request)
            return
        kept = request.found // BLOCK * BLOCK
        del request.kv[kept:]
        request.computed = kept
        if was_waiting and not kept:
            self.running.remove(request)
            self.waiting.insert(0, request)

    def _sample(self, request):
        self.publish(request)
        if request.computed < request.num_tokens:
            return
        prompt = request.kv[: request.num_prompt_tokens]
        request.worst_copied = max(request.worst_copied, sum(truth.copied for truth in prompt))
        request.least_exact = min(request.least_exact, sum(not truth.depth for truth in prompt))
        request.extend([(7 * request.num_tokens + request.all_token_ids[-1]) % 1000])
        if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
            self.end(request)

    def end(self, request):
        """Finish or abort; what the client is told is sent at the end of the step."""
        self.told.append((request, self.graft.finish(request)))
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def _check_reports(self):
        told, self.told = self.told, []
        for request, params in told:
            if params is not None and request.worst_copied:
                report = params["kvgraft"]
                reused = report["shifted_tokens"] + report["continued_tokens"]
                assert reused >= request.worst_copied, "the report is better than the answer"
                assert report["exact_tokens"] <= request.least_exact
                assert report["spans"]

    def preempt(self, request):
        self.running.remove(request)
        self.waiting.insert(0, request)
        request.kv, request.computed = [], 0
        self.preempted.add(request.request_id)
