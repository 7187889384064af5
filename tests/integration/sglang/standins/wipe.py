"""With TEST_KVGRAFT_WIPE set, slots hold no numbers from their allocation to the pass that computes them.

Whoever reads one before, SGLang or a pass of ours, gets an answer that is none.
"""

import logging
import os
from functools import cache


def register():
    """Entry point."""
    if not os.environ.get("TEST_KVGRAFT_WIPE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator.alloc", _wiped, HookType.AROUND)


@cache
def _say_so():
    logging.getLogger(__name__).warning("slots are wiped")


def _wiped(allocate, allocator, num_tokens):
    slots = allocate(allocator, num_tokens)
    if slots is not None:
        _say_so()
        pool = allocator.get_kvcache()
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[slots] = float("nan")
    return slots
