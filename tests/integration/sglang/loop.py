"""SGLang's real scheduler in this process: event loops, tree, allocator and batches, over a model that keeps an account.

A forward pass writes into every slot the number of a `Content`, which says what was computed there: at launch, when SGLang
hands the batch to the stream that runs the model. A slot that is allocated is wiped. So a pass of SGLang's, a copy, an export
or a pass of ours that reads a slot before the pass that computes it was launched finds that nothing is there.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import torch

from kvgraft.integrations.sglang.donors.texts import HostBlockKV
from kvgraft.integrations.sglang.recompute.slot_attention import Recomputation
from kvgraft.reuse.stored import is_stored

NOTHING = -1.0
"""What a slot holds whose pass has not run."""
OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--grammar-backend": "none",
    "--dtype": "float32",
    "--mem-fraction-static": "0.9",
    "--max-running-requests": "8",
    "--chunked-prefill-size": "64",
    "--context-length": "512",
    "--max-total-tokens": "900",
    "--radix-cache-backend": "kvgraft",
}
FLAGS = ("--disable-cuda-graph", "--skip-server-warmup", "--skip-tokenizer-init")


@dataclass(frozen=True, slots=True)
class Content:
    """What a pass computed for one token.

    Attributes:
        token: Its id.
        position: Where it was computed.
        tenant: Of the request.
        text: Names all tokens up to this one, if each of them was computed behind nothing but those before it; else None.
    """

    token: int
    position: int
    tenant: str
    text: int | None


def next_token(last, num_tokens):
    """The token that the model draws after `num_tokens` of which the last one is `last`."""
    return 3 + (last + num_tokens) % 2000


class NotComputedError(AssertionError):
    """A slot was read whose pass has not run, or that holds another token's K/V."""


def build_scheduler(model_dir, settings, page_size):
    """SGLang's `Scheduler`, with the model's weights loaded and never used; the environment is as before."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    if torch.distributed.is_initialized():  # by another one; a process has its groups once
        bootstrap.init_parallel_runtime = lambda **_: None
    words = [word for pair in {**OPTIONS, "--page-size": str(page_size)}.items() for word in pair]
    with mock.patch.dict(os.environ, {f"KVGRAFT_{name.upper()}": str(value) for name, value in settings.items()}):
        load_plugins()
        args = prepare_server_args(["--model-path", model_dir, *words, *FLAGS])
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        return Scheduler(args, PortArgs.init_new(args))


class Loop:
    """Drives a scheduler's event loops and keeps the account.

    Attributes:
        sent: What the scheduler sent to clients, in order.
        wrong: What was read too early.
        num_unfinished: Slots that our copies, exports and passes read after their pass was launched and before SGLang had its
            results.
        is_late: Whether passes run when SGLang takes their results, not at launch: what a model would do that runs on a
            stream of its own, for which nobody waits.
    """

    def __init__(self, scheduler):
        self.scheduler, self.cache, self.reuse = scheduler, scheduler.tree_cache, scheduler.tree_cache.reuse
        self.buffers = self.reuse.loading.loader.buffers
        self.keys, self.values = self.buffers.keys[0], self.buffers.values[0]
        self.is_late = False
        self._wipe_what_is_allocated()
        self._account_for_passes()
        self._account_for_reads()
        self.reset()

    # What is driven

    def run(self, act, *, overlap, chunk=64, mixed=False):
        """Run SGLang's loop until `act`, which is called once per round, has returned True and everything has ended."""
        scheduler, is_over = self.scheduler, False
        scheduler.enable_overlap, scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = overlap, chunk, mixed

        def ingest(*_, **__):
            nonlocal is_over
            self.check_donors()
            if self.wrong:  # what is raised where we read is a counted miss
                raise self.wrong[0]
            is_over = is_over or act(self)
            scheduler.gracefully_exit = bool(is_over and scheduler.is_fully_idle())

        scheduler.ingest_requests, scheduler.gracefully_exit = ingest, False
        (scheduler.event_loop_overlap if overlap else scheduler.event_loop_normal)()
        scheduler.on_idle()  # SGLang counts its slots

    def submit(self, rid, tokens, num_tokens=1, *, reuse="graft", repair="after", stop=(), tenant=None):
        """A request arrives."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(
            max_new_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=not stop,
            stop_token_ids=list(stop),
            custom_params={"kvgraft": reuse, "kvgraft_repair": repair},
        )
        sampling.normalize(None)
        fields = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
        fields |= {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False}
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=rid, input_ids=array("q", tokens), sampling_params=sampling, cache_salt=tenant, **fields
            )
        )

    def abort(self, rid):
        """A client goes away."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=rid))

    def retract(self):
        """Everything that runs gives its slots back and begins anew."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.scheduler._engine_paused = False

    def evict(self, count):
        """Slots are needed."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=count))

    def flush(self):
        """Empty the cache, which SGLang does only while nothing runs; returns whether it did."""
        return bool(self.scheduler.flush_cache())

    def reports(self):
        """The reports of all requests that have been answered, by id."""
        return {rid: entry["report"] for rid, entry in self._entries()}

    def attempts(self):
        """All attempts of those requests, by id."""
        return {rid: entry["attempts"] for rid, entry in self._entries()}

    def _entries(self):
        ended = [output for output in self.sent if getattr(output, "customized_info", None)]
        told = [(output.rids, output.customized_info["kvgraft"]) for output in ended]
        return [(rid, each[0]) for rids, lists in told for rid, each in zip(rids, lists, strict=True) if each]

    def reset(self):
        """Forget everything, also where a run has broken off."""
        scheduler = self.scheduler
        self.contents, self.texts, self.sent, self.wrong = [], {}, [], []
        self.num_unfinished = self.num_recomputed = self.num_repaired = 0
        self._launched, self._unfinished = deque(), deque()
        self.reuse.books.requests.clear()
        self.reuse.repairs.waiting.clear()
        self.reuse.books.log.num_errors = 0
        scheduler.init_running_status()
        scheduler.chunked_req = scheduler._pending_chunked_abort_req = None
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        self.cache.reset()

    # The account

    def _wipe_what_is_allocated(self):
        allocator = self.scheduler.token_to_kv_pool_allocator

        def wiped(allocate):
            def wipe(*args, **kwargs):
                slots = allocate(*args, **kwargs)
                if slots is not None:
                    self.values[slots] = NOTHING
                return slots

            return wipe

        for name in ("alloc", "alloc_extend", "alloc_decode"):
            if hasattr(allocator, name):
                setattr(allocator, name, wiped(getattr(allocator, name)))

    def _account_for_passes(self):
        scheduler = self.scheduler
        scheduler._war_barrier_enabled = False  # set where SGLang enters its loop, for GPUs
        scheduler.model_worker.forward_batch_generation = self.forward
        process = scheduler.process_batch_result

        def finished(batch, result):
            if self.is_late:
                self._run_launched()
            self._unfinished.popleft()
            process(batch, result)

        scheduler.process_batch_result = finished
        for sender in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
            sender.send_output = lambda output, *_: self.sent.append(output)
        model = SimpleNamespace(run=self.run_rows)
        self.reuse.repairs.passes.recomputer = replace(self.reuse.repairs.passes.recomputer, model=model)
        repair = self.reuse.repairs.passes.after

        def after_the_first_token(state, req, slots):
            num_drawn = state.prompt.num_tokens - len(req.origin_input_ids) + 1
            assert len(req.output_ids) == num_drawn, "SGLang has had the first token of this attempt, and no other"
            assert not req.finished()
            self.num_repaired += 1
            repair(state, req, slots)

        self.reuse.repairs.passes.after = after_the_first_token

    def _account_for_reads(self):
        buffers = self.buffers
        copy, export, begin_export = buffers.copy, buffers.export, buffers.begin_export

        def checked_copy(copies, targets):
            for each in copies:
                index = getattr(each.source, "index", None)  # of a block in host memory none
                if index is not None:
                    self.look(torch.arange(self.buffers.num_slots)[index])
            copy(copies, targets)

        def checked(export_of):
            return lambda slots: (self.look(slots), export_of(slots))[1]

        buffers.copy, buffers.export, buffers.begin_export = checked_copy, checked(export), checked(begin_export)

    def forward(self, batch, **_):
        """What SGLang's worker does with a batch: K/V of its tokens, and for every request a token more."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult

        ends = batch.seq_lens.tolist()
        lengths = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(ends)
        table, work = self.scheduler.req_to_token_pool.req_to_token, []
        ids, slots = (deque(numbers.tolist()) for numbers in (batch.input_ids, batch.out_cache_loc))
        for req, index, end, length in zip(batch.reqs, batch.req_pool_indices.tolist(), ends, lengths, strict=True):
            row = table[index, :end].tolist()
            assert row[end - length :] == [slots.popleft() for _ in range(length)]
            work.append((row, [ids.popleft() for _ in range(length)], req))
        self._launched.append(work)
        self._unfinished.append({slot for row, tokens, _ in work for slot in row[len(row) - len(tokens) :]})
        if not self.is_late:
            self._run_launched()
        chosen = torch.tensor([next_token(tokens[-1], len(row)) for row, tokens, _ in work])
        logits = LogitsProcessorOutput(next_token_logits=None)
        return GenerationBatchResult(logits_output=logits, next_token_ids=chosen, can_run_cuda_graph=False)

    def _run_launched(self):
        for row, tokens, req in self._launched.popleft():
            self._compute(row, tokens, req)

    def _compute(self, row, tokens, req):
        """Compute `tokens` at the end of a row, behind what lies in it."""
        start, tenant = len(row) - len(tokens), req.cache_salt or ""
        seen = self._contents(torch.tensor(row[:start], dtype=torch.int64))
        known = req.origin_input_ids[:start].tolist()
        if [content.token for content in seen[: len(known)]] != known:
            raise NotComputedError(f"{req.rid} attends to K/V of other tokens")
        if any(content.tenant != tenant for content in seen):
            raise NotComputedError(f"{req.rid} attends to K/V of another tenant")
        text = self._text_of(seen, tenant)
        mode = req.sampling_params.custom_params["kvgraft"]
        if text is None and mode != "graft":
            raise NotComputedError(f"{req.rid} asked for {mode} and attends to approximate K/V")
        for position, token in enumerate(tokens, start):
            text = None if text is None else self._named(text, token)
            self._new(Content(token, position, tenant, text))
            self.values[row[position]], self.keys[row[position]] = float(len(self.contents) - 1), 0.0

    def run_rows(self, token_ids, rows, attention):
        """What SGLang's decoder does in a pass of ours."""
        slots = attention._prompt.slots
        seen = self.look(slots)
        for token, row in zip(token_ids.tolist(), rows.tolist(), strict=True):
            self._new(Content(token, row, seen[0].tenant, None))
        numbers = torch.arange(len(self.contents) - len(rows), len(self.contents), dtype=torch.float32)
        keys = torch.zeros(len(rows), *self.keys.shape[1:])
        heads = self.scheduler.model_config.num_attention_heads
        query = torch.zeros(len(rows), heads * keys.shape[-1])
        layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, head_dim=keys.shape[-1], scaling=1.0, logit_cap=0.0)
        attention.forward(query, keys, numbers[:, None, None].expand(keys.shape), layer, None)
        if attention.failure is not None:
            raise attention.failure
        self.num_recomputed += len(rows) if isinstance(attention, Recomputation) else 0

    def look(self, slots):
        """Return what lies in slots that something of ours reads; all of it must have been computed."""
        self.num_unfinished += len(set().union(*self._unfinished).intersection(slots.tolist()))
        return self._contents(slots)

    def _contents(self, slots):
        numbers = self.values[slots][:, 0, 0].tolist()
        if NOTHING in numbers:
            slot = slots.tolist()[numbers.index(NOTHING)]
            self.wrong.append(NotComputedError(f"slot {slot} is read before its pass has run"))
            raise self.wrong[-1]
        return [self.contents[int(number)] for number in numbers]

    def check_donors(self):
        """The K/V of every donor are those of its tokens, where it says, and exact where it says so."""
        keeper = self.reuse.books.keeper
        for donor in list(keeper.catalogue):
            if is_stored(donor):
                continue
            if isinstance(donor.kv, HostBlockKV):
                block = keeper.in_host(donor, 0, donor.num_tokens)
                found = [self.contents[int(number)] for number in block.values[0][:, 0, 0].tolist()]
            else:
                text, first = donor.kv.text, donor.kv.offset
                resident = keeper._tree.resident(text, first + donor.num_tokens)
                # Of a text that was evicted the tree may have the beginning alone, in a node of another text.
                stop = min(first + donor.num_tokens, resident.length)
                found = self._contents(keeper._tree.slots(resident.node)[first:stop])
            told = [(donor.start_position + at, int(token)) for at, token in enumerate(donor.token_ids)]
            assert [(content.position, content.token) for content in found] == told[: len(found)]
            if donor.generation == 0 and any(content.text is None for content in found):
                raise NotComputedError("approximate K/V pass for exact in a donor")

    def _text_of(self, seen, tenant):
        text = self._named(None, tenant)
        for position, content in enumerate(seen):
            text = self._named(text, content.token)
            if content.text != text or content.position != position:
                return None
        return text

    def _named(self, text, token):
        return self.texts.setdefault((text, token), len(self.texts))

    def _new(self, content):
        self.contents.append(content)
