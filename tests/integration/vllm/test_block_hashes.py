"""Which blocks of a grafted request vLLM's own cache manager finds again, for every offset; no model runs here."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from engines import text
from kvgraft.config import VLLMConfig
from kvgraft.donors import GUARANTEED_RUN
from kvgraft.integrations.vllm.messages import WorkerReport
from kvgraft.integrations.vllm.scheduler import EngineFacts, GraftScheduler
from kvgraft.integrations.vllm.scheduler.namespaces import namespace_of
from kvgraft.reuse.outcome import GraftOutcome

DOCUMENT, PREFIX = text(5, 600), text(6, 128)
NAMES = count()


class Server:
    """vLLM's cache manager and the connector's scheduler half, called in the order in which vLLM's scheduler calls them."""

    def __init__(self, size: int, load: str) -> None:
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=32, dtype=torch.float32)
        layers = KVCacheConfig(
            num_blocks=4000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(layers, max_model_len=4096, scheduler_block_size=size, hash_block_size=size)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        config = VLLMConfig(load=load, min_run=16, min_saved_tokens=0, selection="none", lookup_deadline_ms=1e9)
        facts = EngineFacts(
            fingerprint="model",
            block_sizes=(size,),
            hash_block_size=size,
            window=0,
            capacity_tokens=10_000,
            hidden_size=64,
            output_chunk=64,
            refusal="",
        )
        self.graft = GraftScheduler(config, facts)
        self.graft.bind(self.manager)

    def request(self, tokens: list[int], mode: str) -> Request:
        extra = {"kv_transfer_params": {"kvgraft": mode}}
        return Request(
            str(next(NAMES)),
            list(tokens),
            SamplingParams(max_tokens=500, extra_args=extra),
            None,
            block_hasher=self.hasher,
        )

    def cached(self, tokens: list[int]) -> int:
        """Tokens that a request with this prompt would find."""
        return self.manager.get_computed_blocks(self.request(tokens, "off"))[1]

    def serve(self, tokens: list[int], mode: str, *, answer: list[int], chunk: int) -> int:
        """Run a request from admission to its end; returns how many tokens were grafted."""
        request = self.request(tokens, mode)
        blocks, local = self.manager.get_computed_blocks(request)[:2]
        grafted, waits = self.graft.match(request, local)
        new = 0 if waits else min(chunk, len(tokens) - local - grafted)
        assert self.manager.allocate_slots(
            request, new, local, blocks, num_external_computed_tokens=grafted, delay_cache_blocks=waits
        )
        self.graft.admit(request, self.manager.get_blocks(request.request_id).get_block_ids(), grafted)
        self.take_step({request.request_id: GraftOutcome((), 0.0, 0.0)} if grafted else {})
        request.num_computed_tokens = local + grafted
        if waits:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            new = min(chunk, len(tokens) - request.num_computed_tokens)
            self.manager.allocate_slots(request, new)
        request.num_computed_tokens += new
        while request.num_computed_tokens < len(tokens):
            new = min(chunk, len(tokens) - request.num_computed_tokens)
            self.manager.allocate_slots(request, new)
            request.num_computed_tokens += new
        for token in answer:
            request.append_output_token_ids(token)
            self.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        self.manager.free(request)
        self.graft.finish(request)
        return grafted

    def take_step(self, outcomes: dict[str, GraftOutcome]) -> None:
        """Let the step end in which a request was admitted."""
        nothing = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
        step = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=nothing,
            num_scheduled_tokens={},
            preempted_req_ids=set(),
            scheduled_spec_decode_tokens={},
        )
        self.graft.commands(step)
        self.graft.receive(WorkerReport(outcomes))


@pytest.mark.parametrize("chunk", [7, 4096], ids=["chunked", "whole"])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("prefix_blocks", [0, 1])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_no_block_with_a_reused_token_is_found_again(size, prefix_blocks, load, chunk):
    server = Server(size, load)
    namespace = namespace_of(server.request([1], "off"), "model")
    server.graft.registry.catalogue.add(namespace, np.asarray(DOCUMENT, np.int32), None)
    prefix = PREFIX[: prefix_blocks * size]
    if prefix:
        server.serve([*prefix, 3], "off", answer=[], chunk=4096)
    for offset in range(size):
        for end in (-1, 0, 1):
            head = prefix + text(100 + offset, offset)
            blocks = -(-(len(head) + GUARANTEED_RUN + 1 - end) // size)
            prompt = head + DOCUMENT[: blocks * size + end - 1 - len(head)] + text(1000 + offset, 1)
            answer = text(2000 + 3 * offset + end, size + 3)
            grafted = server.serve(prompt, "graft", answer=answer, chunk=chunk)
            assert grafted == len(prompt) - 1 - len(prefix), (offset, end)
            exact = len(head) // size * size
            assert server.cached(prompt + answer) == exact, (offset, end)
            assert server.serve(prompt, "off", answer=answer, chunk=chunk) == 0
            assert server.cached(prompt + answer) >= exact + size, "what was computed in full is found"
            assert server.manager.reset_prefix_cache()
            if prefix:
                server.serve([*prefix, 3], "off", answer=[], chunk=4096)
