"""Attention layers with K/V of 8 bits (`--kv-cache-dtype fp8`), which vLLM keeps as bytes, divided by a scale per layer.

What is reused stays as it is stored: values byte by byte, keys rotated in float32 and rounded once more. A rotation is
linear, so the scale takes no part in it. A scale changes with the weights alone, and then nothing of before is reused
(`weights_witness.py`).
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.codec import choose_codec
from kvgraft.integrations.vllm.worker.attention_layer import AttentionLayer, engine_write
from kvgraft.integrations.vllm.worker.layer_hooks import AttentionInputs, calls_seen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from vllm.v1.kv_cache_interface import AttentionSpec

    from kvgraft.integrations.vllm.codec import KVCodec


TOLERANCE = {torch.float8_e4m3fn: 4e-2, torch.float8_e4m3fnuz: 4e-2, torch.float8_e5m2: 8e-2}
"""Largest `rms_error` between two computations of one text: a rounding costs 2.6 and 5 %."""


@dataclass(frozen=True, eq=False)
class Float8Layer(AttentionLayer):
    """A layer of which `cache` are bytes, and the numbers in it of type `number`."""

    number: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """See `AttentionLayer`."""
        return self.number

    @property
    def scales(self) -> tuple[float, float]:
        """See `AttentionLayer`."""
        return _scales(self.module)

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `AttentionLayer`."""
        return self.codec.read(cache.view(self.number), slots)

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `AttentionLayer`; wider numbers that are too large become the largest, as in kernels of engines, never NaN."""
        largest = torch.finfo(self.number).max
        stored = [
            part if part.dtype == self.number else part.clamp(-largest, largest).to(self.number)
            for part in (keys, values)
        ]
        self.codec.write(cache.view(self.number), slots, *stored)

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `AttentionLayer`."""
        slots = torch.arange(len(keys), device=keys.device)
        cache = self.scratch(-(-len(keys) // self.spec.block_size))
        engine_write(self.module, keys, values, cache, slots)  # backends round, or cut off
        return self.read(cache, slots)


def float8_type(module: Any) -> torch.dtype:  # noqa: ANN401 - vLLM's Attention
    """Return the type of the numbers in a cache of bytes.

    Raises:
        IntegrationError: They are not of 8 bits with one scale per layer.
    """
    name = module.kv_cache_dtype
    if name not in {"fp8", "fp8_e4m3", "fp8_e5m2"}:
        raise IntegrationError(f"K/V of type {name} are not supported; use --kv-cache-dtype auto or fp8")
    if module._k_scale.numel() != 1 or module._v_scale.numel() != 1:
        raise IntegrationError("8-bit K/V with a scale per head are not supported; use --kv-cache-dtype auto")
    return torch.float8_e5m2 if name == "fp8_e5m2" else current_platform.fp8_dtype()


def float8_codec(numbers: Tensor, module: Any, spec: AttentionSpec) -> KVCodec:  # noqa: ANN401
    """Prove the layout of a layer, whose cache is seen as `numbers`, as `choose_codec` does.

    The engine gets a little more than the numbers that it should store, so that it does whether it rounds or cuts off.
    """
    by_keys, by_values = (scale * (1 + 1 / 128) for scale in _scales(module))

    def write_numbers(keys: Tensor, values: Tensor, into: Tensor, slots: Tensor) -> None:
        new_keys, new_values = (keys.float() * by_keys).to(module.dtype), (values.float() * by_values).to(module.dtype)
        engine_write(module, new_keys, new_values, into.view(torch.uint8), slots)

    return choose_codec(numbers, spec.num_kv_heads, spec.head_size, spec.block_size, write_numbers)


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root of the mean square of the difference, relative to that of `expected`; infinite if anything is NaN.

    The largest difference says nothing: a number that is rounded to its other neighbour is off by 6 or 12 %, and a few are.
    """
    wide = expected.float()
    error = math.sqrt(float((actual.float() - wide).square().mean() / wide.square().mean().clamp_min(1e-12)))
    return math.inf if math.isnan(error) else error


@contextmanager
def keys_on_their_way(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """Yield a dictionary that takes the keys with which each of `modules` is called while the block runs the model."""
    found: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        found[module] = AttentionInputs.of(module, args, kwargs).keys.clone()

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(calls_seen(module, before=partial(keep, module)))
        yield found


def _scales(module: Any) -> tuple[float, float]:  # noqa: ANN401 - vLLM's Attention
    return float(module._k_scale_float), float(module._v_scale_float)
