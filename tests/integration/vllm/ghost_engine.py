"""vLLM's own scheduler and block manager over the ghost of a model, which knows of every slot whether its K/V are right.

A slot holds a *truth*: the digest of all tokens up to its own where the K/V are those of a full prefill, and something
that no other slot holds where they are approximate. A block keeps what its former owner left until something is written
into it.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engines import OURS, PATIENT, ours
from kvgraft.integrations.vllm.connector import WorkerMetadata
from kvgraft.integrations.vllm.messages import WorkerReport
from kvgraft.integrations.vllm.scheduler.private_hashes import is_tainted
from kvgraft.reuse.outcome import GraftOutcome

BLOCK = 32
STOP = 1000


class WrongKVError(AssertionError):
    """Something reads, serves, publishes, repairs or keeps K/V that are not what they pass for."""


def config_of(folder, *, load="sync", is_async=False, policy="fcfs", **more):
    """The configuration of an engine that is never started."""
    options = {
        **PATIENT,
        "selection": "first_k",
        "load": load,
        "min_run": 16,
        "min_saved_tokens": 0,
        **more,
    }
    config = EngineArgs(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_num_batched_tokens=150,
        max_num_seqs=6,
        max_model_len=1024,
        scheduling_policy=policy,
        kv_transfer_config=KVTransferConfig(**OURS, kv_connector_extra_config=options),
    ).create_engine_config()
    config.scheduler_config.async_scheduling = is_async  # vLLM takes it back on a CPU, and has it by default on a GPU
    return config


_EVERYTHING = 1 << 62


@dataclass(eq=False)
class _Text:
    """A request's tokens as far as they are known, their truths, and the truths of its full blocks by their public hash."""

    tokens: list[int] = field(default_factory=list)
    truths: list[int] = field(default_factory=list)
    last_hash: bytes | None = None
    num_blocks: int = 0

    def follow(self, tokens, public):
        if self.tokens != tokens[: len(self.tokens)]:  # a session goes on in place of the last tokens drawn
            self.tokens, self.truths, self.last_hash, self.num_blocks = [], [], None, 0
        for token in itertools.islice(tokens, len(self.tokens), None):
            self.truths.append(hash((self.truths[-1] if self.truths else 0, token)))
            self.tokens.append(token)
        while (self.num_blocks + 1) * BLOCK <= len(self.tokens):
            first = self.num_blocks * BLOCK
            self.last_hash = hash_block_tokens(sha256, self.last_hash, tuple(self.tokens[first : first + BLOCK]), None)
            public[bytes(self.last_hash)] = self.truths[first : first + BLOCK]
            self.num_blocks += 1


@dataclass(frozen=True, eq=False)
class _Rows:
    """What a step computes of a request."""

    name: str
    start: int
    stop: int
    block_ids: list[int]
    exact_stop: int
    found_stop: int


class GhostEngine:
    """`add`, `step` and `abort` as users and vLLM do; raises `WrongKVError`.

    Attributes:
        fails: Grafts that come to their end fail.
        stops: Names and lengths of the texts that go on with `STOP`.
    """

    def __init__(self, config, *, num_blocks):
        init_none_hash(sha256)
        layers = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = num_blocks
        is_async = config.scheduler_config.async_scheduling
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(layers, spec)], hash_block_size=BLOCK),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.graft = ours(self.scheduler.connector).scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.fails = False
        self.stops = set()
        self.num_grafts = self.num_failed = self.num_repairs = 0
        self._depth = 2 if is_async else 1
        self._slots = [0] * (num_blocks * BLOCK)
        self._under_way = deque()
        self._loads, self._kept, self._donors, self._proved = {}, {}, {}, set()
        self._lost, self._lost_donors, self._unmade = set(), set(), set()
        self._unrepaired = {}
        self._texts, self._public = {}, {}
        self._unique = itertools.count(1)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, name, tokens, mode, *, max_tokens=1, priority=0, skips_cache=False, is_session=False):
        """Let a request arrive, or further input of a session."""
        parameters = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP],
            skip_reading_prefix_cache=skips_cache,
            extra_args={"kv_transfer_params": {"kvgraft": mode}},
        )
        if not is_session or name not in self.scheduler.requests:
            self._texts[name] = _Text()
        self.scheduler.add_request(
            Request(
                name,
                tokens,
                parameters,
                None,
                block_hasher=self._hasher,
                priority=priority,
                arrival_time=0.0,
                resumable=is_session,
            )
        )

    def abort(self, name):
        """End a request early."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def names(self):
        """Requests that have not ended."""
        return [name for name, request in self.scheduler.requests.items() if not request.is_finished()]

    def step(self):
        """Schedule one step, and carry the oldest out if no more may be under way."""
        self.schedule()
        if len(self._under_way) >= self._depth:
            self._carry_out()

    def schedule(self):
        """Schedule one step; whoever is aborted then is aborted before vLLM takes the result of the oldest."""
        while len(self._under_way) >= self._depth:
            self._carry_out()
        output = self.scheduler.schedule()
        self._follow_texts()
        self._under_way.append((output, self._rows(output), self._holders(output)))

    def finish(self, max_steps=5000):
        """Serve everyone that is there."""
        for _ in range(max_steps):
            if not self.names and not self._loads:
                break
            self.step()
        else:
            raise AssertionError(f"requests {self.names} do not end")
        while self._under_way:
            self._carry_out()
        self.graft.check()

    def check_workers(self):
        """Workers have forgotten whatever they kept for requests that ended, once another step came."""
        self.step()
        while self._under_way:
            self._carry_out()
        assert not self._unrepaired

    def _carry_out(self):
        """Take the oldest step through workers and back."""
        output, rows, holders = self._under_way.popleft()
        self._follow_texts()
        commands = output.kv_connector_metadata.commands
        outcomes, invalid, loaded = self._load(commands)
        repairs = {repair.request_id: self._repair(repair, holders) for repair in commands.repairs}
        for each in rows:
            self._forward(each)
        for capture in commands.captures:
            self._keep(capture.text_id, capture.block_ids[0], capture.start, capture.stop)
            if capture.donor_id is not None:
                self._seal(capture.text_id, capture.donor_id)
        told = KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=WorkerMetadata(
                WorkerReport(outcomes, frozenset(self._lost), frozenset(self._lost_donors), repairs=repairs)
            ),
            invalid_block_ids=invalid,
        )
        self._lost_donors.clear()
        names = [each.name for each in rows]
        before = self._num_drawn(each.name for each in rows if self._is_unmade(each))
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                names,
                {name: index for index, name in enumerate(names)},
                [self._sampled(each) for each in rows],
                kv_connector_output=told,
            ),
        )
        if self._num_drawn(before) != before:
            raise WrongKVError(f"tokens of {', '.join(before)} are drawn over K/V that were never made")
        self._check()

    def _num_drawn(self, names):
        requests = self.scheduler.requests
        return {name: requests[name].num_output_tokens for name in names if name in requests}

    def _is_unmade(self, rows):
        return any(self._slot(rows.block_ids, position) in self._unmade for position in range(rows.stop))

    def _rows(self, output):
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        return [
            _Rows(
                name,
                starts[name],
                starts[name] + count,
                self.manager.get_block_ids(name)[0],
                *self._found(name),
            )
            for name, count in output.num_scheduled_tokens.items()
        ]

    def _found(self, name):
        """Positions of a request that must be exact, and those that must be of its text: of others it is not known."""
        request = self.scheduler.requests[name]
        if not is_tainted(request):
            return _EVERYTHING, _EVERYTHING
        state = self.graft._attempts.running.get(name)
        exact = request.block_hashes.first_private * BLOCK
        found = 0 if state is None else state.prompt.cached_len
        return min(exact, found), found

    def _holders(self, output):
        """Blocks of all that run when a step is scheduled that repairs; one that is admitted later reads what is repaired."""
        if not output.kv_connector_metadata.commands.repairs:
            return {}
        return {other.request_id: self.manager.get_block_ids(other.request_id)[0] for other in self.scheduler.running}

    def _follow_texts(self):
        for name, request in self.scheduler.requests.items():
            self._texts[name].follow(request.all_token_ids, self._public)

    def _check(self):
        self._follow_texts()
        for donor in self.graft.registry.catalogue:
            if donor.generation == 0 and donor.donor_id in self._donors and donor.donor_id not in self._proved:
                self._check_donor(donor)
        if self._under_way:
            return
        for block in self.manager.block_pool.blocks:
            expected = None if block.block_hash is None else self._public.get(bytes(block.block_hash)[:32])
            first = block.block_id * BLOCK
            if expected is not None and self._slots[first : first + BLOCK] != expected:
                raise WrongKVError(f"block {block.block_id} is public and wrong")

    def _check_donor(self, donor):
        """Each truth of a donor that passes for exact follows from the one in front of it."""
        values, tokens = self._donors[donor.donor_id], donor.token_ids
        if len(values) != len(tokens):
            raise WrongKVError(f"donor {donor.donor_id} of {len(tokens)} tokens has K/V of {len(values)}")
        parents = [0 if donor.start_position == 0 else None, *values]
        for parent, value, token in zip(parents, values, tokens, strict=False):
            if parent is not None and value != hash((parent, int(token))):
                raise WrongKVError(f"donor {donor.donor_id} is of generation 0 and wrong")
        self._proved.add(donor.donor_id)

    # ---- workers

    def _load(self, commands):
        outcomes, invalid, loaded = {}, set(), set()
        for name in commands.cancels:
            self._unrepaired.pop(name, None)
            if self._loads.pop(name, None):
                loaded.add(name)
        for seal in commands.seals:
            self._seal(seal.text_id, seal.donor_id)
        self._loads |= {graft.request_id: [graft, 2 * graft.asynchronous] for graft in commands.grafts}
        for text_id in commands.discards:
            self._kept.pop(text_id, None)
            self._lost.discard(text_id)
        for name, load in list(self._loads.items()):
            graft, steps_left = load
            load[1] -= 1
            if steps_left:
                continue
            del self._loads[name]
            is_failure = bool(self.fails or graft.void)
            if is_failure:
                self.num_failed += 1
                ids = graft.block_ids[0]
                invalid.update(ids[graft.plan.prefix_len // BLOCK :])
                self._unmade.update(self._slot(ids, position) for position in range(graft.plan.prefix_len, graft.end))
                self._lose(text_id for text_id, _, _ in graft.captures)
                self._lose([graft.tail] if graft.tail is not None else [])
            else:
                self._make(graft)
                self._unrepaired |= {name: graft} if graft.repairs_after else {}
            outcomes[name] = GraftOutcome((), 0.0, 0.0, "injected" * is_failure, failed=is_failure)
            if graft.asynchronous:
                loaded.add(name)
        for donor_id in commands.drops:
            self._donors.pop(donor_id, None)
        return outcomes, invalid, loaded

    def _make(self, graft):
        """Copy and compute what a graft promised; its pass reads everything in front."""
        self.num_grafts += 1
        truths, ids = self._texts[graft.request_id].truths, graft.block_ids[0]
        prefix_len = graft.plan.prefix_len
        self._check_read(ids, truths, prefix_len, f"the pass of {graft.request_id} reads", is_exact=False)
        copied = {}
        for span in graft.spans:
            for offset in range(span.length):
                copied[span.target_start + offset] = self._donors[span.donor_id][span.donor_start + offset]
        is_exact = self._read(ids, prefix_len) == truths[:prefix_len]
        for position in range(prefix_len, graft.end):
            is_exact = is_exact and copied.get(position, truths[position]) == truths[position]
            self._write(ids, position, truths[position] if is_exact else self._approximate(truths, position))
        for text_id, start, stop in graft.captures:
            self._keep(text_id, ids, start, stop)

    def _repair(self, repair, holders):
        """Compute the first tokens of each run again, in blocks that nobody else may find or hold."""
        graft, ids = self._unrepaired.pop(repair.request_id, None), repair.block_ids[0]
        if graft is None:
            return GraftOutcome((), 0.0, 0.0, "not there", failed=True, is_gone=True)
        self.num_repairs += 1
        runs = tuple((span.target_start, min(16, span.length)) for span in graft.plan.spans if span.is_shifted)
        written = {ids[position // BLOCK] for start, count in runs for position in range(start, start + count)}
        for other, held in holders.items():
            if other != repair.request_id and not written.isdisjoint(held):
                raise WrongKVError(f"the repair of {repair.request_id} writes into blocks of {other}")
        for block in written:
            block_hash = self.manager.block_pool.blocks[block].block_hash
            if block_hash is not None and bytes(block_hash)[:32] in self._public:
                raise WrongKVError(f"the repair of {repair.request_id} writes into public block {block}")
        for start, count in runs:
            for position in range(start, start + count):
                self._write(ids, position, self._approximate(self._texts[repair.request_id].truths, position))
        return GraftOutcome(runs, 0.0, 0.0)

    def _forward(self, rows):
        unrepaired = self._unrepaired.get(rows.name)
        if unrepaired is not None and rows.start >= unrepaired.plan.num_tokens:
            raise WrongKVError(f"a token of {rows.name} is drawn before its repair")
        truths = self._texts[rows.name].truths
        known = min(rows.start, len(truths))
        told = f"request {rows.name} is served"
        self._check_read(rows.block_ids, truths, min(known, rows.exact_stop), told)
        self._check_read(rows.block_ids, truths, min(known, rows.found_stop), told, is_exact=False)
        is_exact = self._read(rows.block_ids, known) == truths[:known]
        for position in range(rows.start, rows.stop):
            is_known = position < len(truths)  # not of a request that ended while the step was under way
            value = truths[position] if is_exact and is_known else self._approximate(truths, position)
            self._write(rows.block_ids, position, value)

    def _approximate(self, truths, position):
        """K/V of a text that differ from all others."""
        return (truths[position] if position < len(truths) else None, next(self._unique))

    def _check_read(self, ids, truths, stop, told, *, is_exact=True):
        held = self._read(ids, stop)
        if not is_exact:
            held = [value[0] if isinstance(value, tuple) else value for value in held]
        if held != truths[:stop]:
            position = next(index for index, value in enumerate(held) if value != truths[index])
            raise WrongKVError(f"{told} position {position} of {stop}, which holds no K/V of its text")

    def _read(self, ids, stop):
        blocks = (self._slots[block * BLOCK : (block + 1) * BLOCK] for block in ids[: -(-stop // BLOCK)])
        return list(itertools.chain.from_iterable(blocks))[:stop]

    def _lose(self, text_ids):
        """What stands behind a graft that failed becomes no donor."""
        for text_id in text_ids:
            self._lost.add(text_id)
            self._kept.pop(text_id, None)

    def _seal(self, text_id, donor_id):
        if text_id in self._kept:
            self._donors[donor_id] = self._kept.pop(text_id)
        else:
            self._lost_donors.add(donor_id)
            self._lost.discard(text_id)

    def _keep(self, text_id, ids, start, stop):
        if text_id in self._lost:
            return
        kept = [self._slots[self._slot(ids, position)] for position in range(start, stop)]
        self._kept.setdefault(text_id, []).extend(kept)

    def _slot(self, ids, position):
        return ids[position // BLOCK] * BLOCK + position % BLOCK

    def _write(self, ids, position, value):
        slot = self._slot(ids, position)
        self._slots[slot] = value
        self._unmade.discard(slot)

    def _sampled(self, rows):
        """A token where a step reaches the end of what is known, none in the middle of a prefill."""
        tokens = self._texts[rows.name].tokens
        if (rows.name, len(tokens)) in self.stops:
            return [STOP]
        return [] if rows.stop < len(tokens) else [(7 * len(tokens) + tokens[-1]) % 50]
