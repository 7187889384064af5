"""A KV connector that works: blocks under the tokens up to their end, in this process's memory. It knows nothing of grafts.

It saves in `save_kv_layer` and loads in `start_load_kv` what its metadata name, prompts and answers alike. A block is copied
as the backend lays it out, which one kind of engine reads again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

SAVED: dict[tuple, dict] = {}
"""By salt and tokens, by layer: one block's K/V."""


@dataclass
class Moves(KVConnectorMetadata):
    """Pairs of a key and a block."""

    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)


class TokenStore(KVConnectorBase_V1, SupportsHMA):
    resets = True
    loses = False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.requests, self.computed, self.blocks, self.saved_to = {}, {}, {}, {}
        self.loads, self.caches = [], {}
        self.calls = []
        self.seen_layers, self.strange_calls, self.lost = set(), 0, set()

    # ---- scheduler

    def on_new_request(self, request):
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        usable = (request.num_tokens - 1) // self.block_size
        found = 0
        while found < usable and self.key(request, found) in SAVED:
            found += 1
        self.computed[request.request_id] = num_computed_tokens
        return max(0, found * self.block_size - num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append(("admitted", request.request_id))
        (ids,) = blocks.get_block_ids()
        self.requests[request.request_id] = request
        start = self.computed.pop(request.request_id, 0)
        blocks = range(start // self.block_size, (start + num_external_tokens) // self.block_size)
        self.loads += [(self.key(request, index), ids[index]) for index in blocks]

    def build_connector_meta(self, scheduler_output):
        moves, self.loads = Moves(loads=self.loads), []
        for new in scheduler_output.scheduled_new_reqs:
            self.blocks[new.req_id], self.saved_to[new.req_id] = list(new.block_ids[0]), 0
            moves.saves += self.due(new.req_id, new.num_computed_tokens, scheduler_output)
        running = scheduler_output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        ):
            if req_id in running.resumed_req_ids:
                self.blocks[req_id] = list(blocks[0])
            elif blocks is not None:
                self.blocks[req_id] += blocks[0]
            moves.saves += self.due(req_id, computed, scheduler_output)
        return moves

    def due(self, req_id, computed, scheduler_output):
        """Blocks that this step fills up."""
        request, first = self.requests[req_id], self.saved_to[req_id]
        stop = (computed + scheduler_output.num_scheduled_tokens[req_id]) // self.block_size
        self.saved_to[req_id] = max(first, stop)
        return [(self.key(request, index), self.blocks[req_id][index]) for index in range(first, stop)]

    def key(self, request, index):
        return request.cache_salt, tuple(request.all_token_ids[: (index + 1) * self.block_size])

    def request_finished(self, request, block_ids):
        self.calls.append(("finished", request.request_id, tuple(block_ids)))
        for known in (self.requests, self.computed, self.blocks, self.saved_to):
            known.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids[0])

    def reset_cache(self):
        if self.resets:
            SAVED.clear()
            return True
        return None

    # ---- worker

    def register_kv_caches(self, kv_caches):
        self.caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        for key, block in self._get_connector_metadata().loads:
            if self.loses:
                self.lost.add(block)
                continue
            for layer, saved in SAVED[key].items():
                self.caches[layer][block] = saved

    def get_block_ids_with_load_errors(self):
        lost, self.lost = self.lost, set()
        return lost

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        if layer_name in self.seen_layers or kv_layer.shape != self.caches[layer_name].shape:
            self.strange_calls += 1  # from a pass that is not the engine's own
        self.seen_layers.add(layer_name)
        if kv_layer.shape != self.caches[layer_name].shape:
            return
        for key, block in self._get_connector_metadata().saves:
            SAVED.setdefault(key, {}).setdefault(layer_name, kv_layer[block].clone())

    def wait_for_save(self):
        self.seen_layers.clear()
