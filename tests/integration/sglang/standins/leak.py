"""Control of the idle memory check: with TEST_KVGRAFT_LEAK set, every load takes a page too many and keeps it."""

import os


def register():
    """Entry point."""
    if not os.environ.get("TEST_KVGRAFT_LEAK"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("kvgraft.integrations.sglang.cache.SGLangTree.allocate", _leaky, HookType.AROUND)


def _leaky(allocate, tree, num_tokens):
    allocate(tree, tree._page_size)
    return allocate(tree, num_tokens)
