"""Runs the unit tests of SGLang's MambaRadixCache, unchanged and from a checkout of yours, on `StateRadixCache`.

    python -m tests.support.sglang_mamba SGLANG/test/registered/radix_cache/test_mamba_unittest.py [--split-is-use] [TEST ...]

Modules named as SGLang's stand in for it: its calls, and pools that count slots. Its tests of pools are about its own classes
and mean nothing here: `test_mamba_radix_cache_1` and `test_insert_prev_prefix_len` are those of the cache. Of the first one
step differs, which docs/design/prefix-cache.md explains; `--split-is-use` takes SGLang's side there and shows the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import unittest
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgraft.prefix import RadixKey, StateRadixCache
from kvgraft.testing.slots import CheckedSlots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TESTS = ("TestMamba.test_mamba_radix_cache_1", "TestMamba.test_insert_prev_prefix_len")
_STATE_VALUES = 3
"""Numbers in a state of the stand-in pool, enough to see that it was copied."""


class _Slots:
    """An allocator of tensors of slots."""

    def __init__(self, size: int) -> None:
        self._slots = CheckedSlots(size)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        slots = self._slots.alloc(num_slots)
        return None if slots is None else torch.from_numpy(slots)

    def free(self, slots: Any) -> None:
        self._slots.free(np.asarray(slots))

    def available_size(self) -> int:
        return self._slots.available


class _StatePool(_Slots):
    """States of one layer, random numbers until they are copied."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.mamba_cache = SimpleNamespace(
            conv=[torch.rand(1, size, _STATE_VALUES)], temporal=torch.rand(1, size, _STATE_VALUES)
        )

    def copy(self, source: int, target: int) -> None:
        for layers in (*self.mamba_cache.conv, self.mamba_cache.temporal):
            layers[:, target] = layers[:, source]


class _RequestPool:
    def __init__(self, *, mamba_size: int, **_options: object) -> None:
        self.mamba_pool = _StatePool(mamba_size)

    def alloc(self, requests: Sequence[Any]) -> None:
        for request in requests:
            slots = self.mamba_pool.alloc(1)
            assert slots is not None, "the pool of states is too small"
            request.mamba_pool_idx = slots[0]


class _SplitIsUse(StateRadixCache):
    """A split refreshes the lower half, although it is the half that was not asked for."""

    def _divide(self, node: Any, length: int) -> Any:
        upper = super()._divide(node, length)
        node.last_access = self._tree.now
        self._requeue(node)
        return upper


class _MambaRadixCache:
    """SGLang's calls on a `StateRadixCache`: frees what that returns, and copies a state where a match asks for it."""

    cache_class: type[StateRadixCache] = StateRadixCache

    def __init__(self, params: Any) -> None:
        self._cache = self.cache_class(params.page_size)
        self._slots = params.token_to_kv_pool_allocator
        self._states = params.req_to_token_pool.mamba_pool

    def insert(self, params: Any) -> SimpleNamespace:
        length = len(params.key.token_ids)
        start = getattr(params, "prev_prefix_len", 0)
        result = self._cache.insert(params.key, params.value.numpy(), states={length: int(params.mamba_value)})
        self._slots.free(params.value[start : result.prefix_len])
        self._states.free(result.state_freed)
        return SimpleNamespace(prefix_len=result.prefix_len, mamba_exist=len(result.state_freed) > 0)

    def match_prefix(self, params: Any) -> SimpleNamespace:
        match = self._cache.match_prefix(params.key)
        node: Any = match.handle
        if getattr(params, "cow_mamba", False) and match.state is not None:
            lock = self._cache.inc_lock_ref(match.handle)
            self._states.copy(match.state, int(params.req.mamba_pool_idx))
            self._cache.dec_lock_ref(lock)
        state = None if match.state is None else torch.tensor([match.state])
        last = SimpleNamespace(key=range(len(node)), mamba_value=state)
        return SimpleNamespace(device_indices=torch.from_numpy(match.kv_indices.copy()), last_device_node=last)

    def evict(self, params: Any) -> SimpleNamespace:
        result = self._cache.evict(params.num_tokens, getattr(params, "mamba_num", 0))
        self._slots.free(result.freed)
        self._states.free(result.state_freed)
        return SimpleNamespace(num_tokens_evicted=len(result.freed), mamba_num_evicted=len(result.state_freed))

    def sanity_check(self) -> None:
        self._cache.check()

    def pretty_print(self) -> None:
        """Print nothing."""

    def available_and_evictable_str(self) -> str:
        return f"{self._slots.available_size()} + {self._cache.evictable_size}"


def _stand_ins() -> dict[str, dict[str, object]]:
    """Names that the tests import, by module."""
    override = SimpleNamespace(override=lambda _value: contextlib.nullcontext())
    return {
        "srt.configs.mamba_utils": {
            "Mamba2CacheParams": SimpleNamespace,
            "Mamba2StateShape": SimpleNamespace(create=dict),
        },
        "srt.environ": {"envs": SimpleNamespace(SGLANG_MAMBA_SSM_DTYPE=override)},
        "srt.managers.schedule_batch": {"Req": SimpleNamespace},
        "srt.mem_cache.allocator": {"TokenToKVPoolAllocator": lambda size, **_options: _Slots(size)},
        "srt.mem_cache.base_prefix_cache": dict.fromkeys(
            ("EvictParams", "InsertParams", "MatchPrefixParams"), SimpleNamespace
        ),
        "srt.mem_cache.cache_init_params": {"CacheInitParams": SimpleNamespace},
        "srt.mem_cache.common": {"available_and_evictable_str": lambda tree: tree.available_and_evictable_str()},
        "srt.mem_cache.mamba_radix_cache": {"MambaRadixCache": _MambaRadixCache},
        "srt.mem_cache.memory_pool": {"HybridLinearKVPool": SimpleNamespace, "HybridReqToTokenPool": _RequestPool},
        "srt.mem_cache.radix_cache": {"RadixKey": lambda token_ids, extra_key=None: RadixKey(token_ids, extra_key)},
        "srt.sampling.sampling_params": {"SamplingParams": SimpleNamespace},
        "srt.server_args": {
            "ServerArgs": SimpleNamespace,
            "set_global_server_args_for_scheduler": lambda _arguments: None,
        },
        "srt.utils": {"get_device": lambda: "cpu"},
        "test.ci.ci_register": dict.fromkeys(("register_cuda_ci", "register_amd_ci"), lambda **_options: None),
    }


@contextlib.contextmanager
def sglang_modules() -> Iterator[None]:
    """Have `import sglang...` find the stand-ins meanwhile."""
    before = dict(sys.modules)
    for name, attributes in _stand_ins().items():
        parts = ["sglang", *name.split(".")]
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[".".join(parts)]).update(attributes)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.split(".")[0] == "sglang"})


def run_tests(path: str, names: Sequence[str] = _TESTS, *, split_is_use: bool = False) -> unittest.TestResult:
    """Run tests of a file of SGLang's on our cache."""
    _MambaRadixCache.cache_class = _SplitIsUse if split_is_use else StateRadixCache
    with sglang_modules():
        spec = importlib.util.spec_from_file_location("sglang_mamba_unittest", path)
        assert spec is not None, f"{path} is no Python file"
        assert spec.loader is not None, f"{path} cannot be loaded"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests = unittest.defaultTestLoader.loadTestsFromNames(names, module)
        return unittest.TextTestRunner(verbosity=2).run(tests)


def main() -> int:
    """Run the file that the command line names; return 1 if a test fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="test_mamba_unittest.py of a checkout of SGLang")
    parser.add_argument("tests", nargs="*", default=_TESTS, help="Class.test (default: those of the cache)")
    parser.add_argument("--split-is-use", action="store_true", help="a split refreshes its lower half, as in SGLang")
    args = parser.parse_args()
    return int(not run_tests(args.file, args.tests, split_is_use=args.split_is_use).wasSuccessful())


if __name__ == "__main__":
    sys.exit(main())
