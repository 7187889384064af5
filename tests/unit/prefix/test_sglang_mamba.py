"""The runner of SGLang's tests of its mamba cache: files that make its calls run on ours, and fail where they should."""

from __future__ import annotations

import sys

import pytest
from tests.support.sglang_mamba import run_tests

CALLS = """
import unittest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey


class TestMamba(unittest.TestCase):
    def test_calls(self):
        requests, slots = HybridReqToTokenPool(mamba_size=4), TokenToKVPoolAllocator(size=20)
        pools = {"req_to_token_pool": requests, "token_to_kv_pool_allocator": slots}
        tree, states = MambaRadixCache(CacheInitParams(page_size=1, **pools)), requests.mamba_pool
        for exists in (False, True):
            state, value = states.alloc(1), slots.alloc(3)
            result = tree.insert(InsertParams(key=RadixKey([1, 2, 3]), value=value, mamba_value=state, prev_prefix_len=0))
            assert (result.prefix_len, result.mamba_exist) == (3 * exists, exists)
        assert (slots.available_size(), states.available_size()) == (17, 3)
        req = type("Req", (), {})()
        requests.alloc([req])
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey([1, 2, 3, 4]), req=req, cow_mamba=True))
        temporal = states.mamba_cache.temporal
        assert torch.equal(temporal[:, req.mamba_pool_idx], temporal[:, match.last_device_node.mamba_value[0]])
        result = tree.evict(EvictParams(num_tokens=0, mamba_num=1))
        assert (result.num_tokens_evicted, result.mamba_num_evicted) == (3, EVICTED)
        tree.sanity_check()
"""


@pytest.mark.parametrize("evicted", [1, 2])
def test_a_file_that_makes_sglangs_calls_runs_on_our_cache(tmp_path, evicted):
    path = tmp_path / "test_theirs.py"
    path.write_text(CALLS.replace("EVICTED", str(evicted)))
    before = {name for name in sys.modules if name.split(".")[0] == "sglang"}
    result = run_tests(str(path), ["TestMamba.test_calls"])
    assert (result.testsRun, len(result.errors), len(result.failures)) == (1, 0, evicted - 1)
    assert {name for name in sys.modules if name.split(".")[0] == "sglang"} == before
