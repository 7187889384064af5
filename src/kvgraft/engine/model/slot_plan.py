"""Number of K/V slots of an engine: one per token, for window layers fewer of their own where that pays, and of states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.config import physical_memory, quoted
from kvgraft.errors import ConfigError
from kvgraft.memory.pool import SlotPool

if TYPE_CHECKING:
    import torch

    from kvgraft.engine.model.layers import ModelLayers
    from kvgraft.memory.hybrid_pool import HybridSlotPool
    from kvgraft.memory.state_pool import StatePool
    from kvgraft.windows import WindowKind

MIN_SLOTS = 64
"""Fewer slots, of any space, serve no useful prompt; the self-check needs as many."""
_MAX_WINDOW_SHARE = 0.5
"""Window slots per full slot at most. With one, prompts shorter than a window fill both spaces alike and nothing is gained;
the half costs a pool of short prompts at most a third of its tokens (equal shares of layers; an eighth at 5:1)."""
_PIECE_TOKENS = 2048
"""Rows of one sequence in a forward pass that the window space is planned for; longer pieces take what is free."""
_NUMBERS_PER_WINDOW_SLOT = 16
"""Full slots per window slot of a model without full-attention layers: they are numbers without K/V, 20 bytes each."""
_MIN_PIECE_TOKENS = 32
DECODE_TOKENS = 16
"""Window slots that a stream takes at a time; it gives back as many. Bounds what it holds beyond its window."""
_STATE_SHARE = 0.5
"""Share of the bytes that states get. A request that goes on from a recorded state needs the K/V of its tokens, too, and at
a few thousand tokens a state of the models that we know takes about as much as they do. SGLang gives states 0.47."""
_FEWEST_STATES = 4
"""Two requests that run, and a state recorded of each."""
_TOKENS_PER_STATE = 16
"""More states than one for so many tokens would find no text to be recorded for."""
_BOOK_BYTES = 24
"""Of a slot beside its K/V: who holds it."""


def running_states(num_states: int, max_running: int) -> int:
    """How many of so many states are for requests that run; the others can be recorded."""
    return min(max_running, num_states // 2)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of an engine.

    Attributes:
        num_slots: Tokens that have K/V in full-attention layers, or in all layers where there is one space.
        num_window_slots: Tokens that have K/V in window layers; 0 where there is one space for all layers.
        num_states: States of sequences in layers that keep one, beside the slots; 0 for a model without such layers.
    """

    num_slots: int
    num_window_slots: int = 0
    num_states: int = 0

    @classmethod
    def uniform(cls, layers: ModelLayers, dtype: torch.dtype, num_slots: int, kv_bytes: int) -> SlotPlan:
        """One space for all layers: `num_slots`, or for 0 as many as `kv_bytes` hold."""
        return cls(num_slots or max(MIN_SLOTS, kv_bytes // sum(layers.bytes_per_token(dtype))))

    @classmethod
    def with_states(
        cls, layers: ModelLayers, dtype: torch.dtype, num_slots: int, kv_bytes: int, *, max_running: int
    ) -> SlotPlan:
        """Slots of tokens and states, half of the bytes for each: `num_slots` and as much, or for 0 what `kv_bytes` hold.

        Requests that run may come to hold half of the states, or `max_running` if these are fewer; others wait.

        Raises:
            ConfigError: `kv_bytes` hold too few of either.
        """
        token_bytes, state_bytes = sum(layers.bytes_per_token(dtype)), layers.bytes_per_state
        asked = num_slots or int(kv_bytes * (1 - _STATE_SHARE)) // token_bytes
        most = max_running + asked // _TOKENS_PER_STATE
        num_states = max(_FEWEST_STATES, min(most, asked * token_bytes // state_bytes))
        if num_slots:
            return cls(num_slots, num_states=num_states)
        num_slots = (kv_bytes - num_states * state_bytes) // token_bytes
        if num_slots < MIN_SLOTS:
            needed = _FEWEST_STATES * state_bytes + MIN_SLOTS * token_bytes
            raise ConfigError(
                f"kv_bytes={kv_bytes} are too few for {_FEWEST_STATES} states of {state_bytes} bytes and {MIN_SLOTS} tokens "
                f"of {token_bytes}; raise it to {needed} or more"
            )
        return cls(num_slots, num_states=num_states)

    @classmethod
    def on_host(cls, layers: ModelLayers, dtype: torch.dtype, num_bytes: int) -> SlotPlan:
        """Slots of tokens and states in host memory, half of the bytes for each, for a model that keeps states.

        Raises:
            ConfigError: `num_bytes` hold too few of either.
        """
        token_bytes, state_bytes = sum(layers.bytes_per_token(dtype)), layers.bytes_per_state
        asked = int(num_bytes * (1 - _STATE_SHARE)) // token_bytes
        num_states = min(asked // _TOKENS_PER_STATE, int(num_bytes * _STATE_SHARE) // state_bytes)
        if not num_states:
            needed = 2 * max(state_bytes, _TOKENS_PER_STATE * token_bytes)
            raise ConfigError(
                f"prefix_host_bytes={quoted(num_bytes)} hold no state of {state_bytes} bytes beside tokens of {token_bytes}; "
                f"raise prefix_host_bytes to {needed} or more, or set it to 0"
            )
        return cls((num_bytes - num_states * state_bytes) // token_bytes, num_states=num_states)

    @classmethod
    def windowed(
        cls,
        layers: ModelLayers,
        dtype: torch.dtype,
        num_slots: int,
        kv_bytes: int,
        *,
        max_running: int,
        page_size: int = 1,
        ratio: float = 0.0,
    ) -> SlotPlan | None:
        """Two spaces; None if no layer has a window or the windows are too large for these slots to save anything.

        The window space gets two windows for each request that may run (its own, and one of a cached prefix) and room for
        a piece of prefill, at most half as many slots as there are tokens; what is saved goes to the other space. A `ratio`
        above 0 says how many window slots there are per token instead.

        Raises:
            ConfigError: `ratio` gives fewer window slots than `max_running` requests hold.
        """
        if layers.window is None:
            return None
        window = layers.window.size
        if ratio:
            plan = _by_ratio(*layers.bytes_per_token(dtype), num_slots, kv_bytes, ratio)
            _require_windows(plan, layers.window, max_running, page_size)
            return plan
        kept = kept_window(window, page_size)
        fewest = fewest_window_slots(window, page_size)
        most = max(fewest, 2 * max_running * kept + max(_PIECE_TOKENS, kept))
        if num_slots:
            plan = cls(num_slots, max(fewest, min(most, int(num_slots * _MAX_WINDOW_SHARE))))
        else:
            plan = _by_bytes(*layers.bytes_per_token(dtype), kv_bytes, fewest, most)
        return plan if plan.num_window_slots < plan.num_slots else None


def kept_window(window: int, page_size: int = 1) -> int:
    """Most positions before the frontier of a sequence: a window in whole pages, and a page that is not full."""
    return window + -window % page_size + page_size - 1


def fewest_window_slots(window: int, page_size: int = 1) -> int:
    """Window slots with which one request always gets on.

    It holds a window of its own and, until it has left a cached prefix behind, what the lock on it covers: whole nodes, less
    than two windows. A piece of prefill comes on top.
    """
    return max(MIN_SLOTS, 3 * kept_window(window, page_size) + _MIN_PIECE_TOKENS)


def build_pool(
    layers: ModelLayers, plan: SlotPlan, dtype: torch.dtype, device: torch.device
) -> SlotPool | HybridSlotPool:
    """Allocate what is planned.

    Raises:
        ConfigError: The slots take more memory than there is.
    """
    full, window = layers.bytes_per_token(dtype)
    if plan.num_window_slots:
        num_bytes = plan.num_slots * full + plan.num_window_slots * window
    else:
        num_bytes = plan.num_slots * (full + window)
    too_large = ConfigError(
        f"{quoted(plan.num_slots)} K/V slots take {quoted(num_bytes >> 20)} MiB, more than there is on device "
        f"{str(device)!r}; lower num_slots or kv_bytes"
    )
    if device.type == "cpu" and num_bytes + plan.num_slots * _BOOK_BYTES > physical_memory():
        raise too_large
    try:
        if not plan.num_window_slots:
            return SlotPool(layers.shapes, plan.num_slots, dtype, device)
        from kvgraft.memory.hybrid_pool import HybridSlotPool  # loaded for models with windows

        return HybridSlotPool(
            layers.shapes,
            layers.windows,
            num_slots=plan.num_slots,
            num_window_slots=plan.num_window_slots,
            dtype=dtype,
            device=device,
        )
    except (MemoryError, RuntimeError) as error:
        raise too_large from error


def build_states(layers: ModelLayers, plan: SlotPlan, device: torch.device) -> StatePool | None:
    """Allocate the planned states; None for a model without layers that keep one.

    Raises:
        ConfigError: They take more memory than there is, or none are planned.
    """
    if not layers.mixers:
        return None
    if not plan.num_states:
        raise ConfigError("this model has layers that keep a state, and no states are planned for them")
    num_bytes = plan.num_states * layers.bytes_per_state
    too_large = ConfigError(
        f"{plan.num_states} states of {quoted(layers.bytes_per_state >> 10)} KiB take {quoted(num_bytes >> 20)} MiB, more "
        f"than there is on device {str(device)!r}; lower max_running"
    )
    if device.type == "cpu" and num_bytes > physical_memory():
        raise too_large
    try:
        from kvgraft.memory.state_pool import StatePool  # loaded for models that keep a state

        return StatePool(layers.state_parts, plan.num_states, device)
    except (MemoryError, RuntimeError) as error:
        raise too_large from error


def _by_ratio(full_bytes: int, window_bytes: int, num_slots: int, kv_bytes: int, ratio: float) -> SlotPlan:
    """`ratio` window slots for each of `num_slots`, or for 0 of as many as `kv_bytes` hold."""
    num_slots = num_slots or int(kv_bytes / (full_bytes + ratio * window_bytes))
    return SlotPlan(num_slots, max(1, int(num_slots * ratio)))


def _require_windows(plan: SlotPlan, window: WindowKind, max_running: int, page_size: int) -> None:
    """Refuse a plan under which `max_running` requests could never decode side by side."""
    each = kept_window(window.size, page_size) + DECODE_TOKENS
    fewest = fewest_window_slots(window.size, page_size)
    needed = max(fewest, max_running * each)
    if plan.num_window_slots >= needed:
        return
    remedies = ["raise num_slots or kv_bytes"]
    if needed <= plan.num_slots:
        remedies.insert(0, f"raise it to {math.ceil(1000 * needed / plan.num_slots) / 1000:g}")
    if plan.num_window_slots >= fewest:
        remedies.append(f"lower max_running to {plan.num_window_slots // each}")
    raise ConfigError(
        f"hybrid_kvcache_ratio gives {plan.num_window_slots} slots of window layers to {plan.num_slots} tokens; "
        f"max_running {max_running} with {window} needs {needed}: {', or '.join(remedies)}"
    )


def _by_bytes(full_bytes: int, window_bytes: int, kv_bytes: int, fewest: int, most: int) -> SlotPlan:
    """Share `kv_bytes` between spaces with tokens that take `full_bytes` and `window_bytes`."""
    if not full_bytes:
        num_window_slots = max(fewest, kv_bytes // window_bytes)
        return SlotPlan(_NUMBERS_PER_WINDOW_SLOT * num_window_slots, num_window_slots)
    half_filled = int(kv_bytes / (full_bytes + _MAX_WINDOW_SHARE * window_bytes))
    num_window_slots = max(fewest, min(most, int(half_filled * _MAX_WINDOW_SHARE)))
    return SlotPlan((kv_bytes - num_window_slots * window_bytes) // full_bytes, num_window_slots)
