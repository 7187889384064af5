"""Prove, once per loaded model, that kvgraft may touch its K/V; refuse with a reason where it cannot be proved.

Four proofs: K/V written to the pool reads back unchanged; the sparse forward of a whole prompt, and of gaps in it, equals
the model's own forward (where layers keep a state, that of two prompts in pieces of many lengths side by side, longer than
the chunks in which such layers compute); one sequence's length changes another's logits nowhere but where the engine
keeps them apart (`rope_lengths`); and moved keys equal keys computed at the new position, in every layer. For the last one a
prompt of a single token is enough: it attends only to itself, so its hidden states do not depend on its position and each
layer's key is a pure function of token and position. That also shows which layers rotate at all and how their channels pair
up.

"Equal" is to rounding: within a tolerance, or within twice what the model differs from itself by: a float32 model where its
prompt is cut in the same pieces, one in half precision where it is computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.model.own_noise import MOST_NOISE, own_noise, own_rounding
from kvgraft.engine.model.probe_tokens import probe_tokens
from kvgraft.engine.model.rope_lengths import check_lengths
from kvgraft.errors import ModelError
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.rope_proof import TOLERANCE, find_rotations, refused_rope_parameters, relative_error
from kvgraft.model_cache import cache_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.graft.rope import RopeSpec

PROBE_SLOTS = 64
"""K/V slots that the self-check needs; a smaller pool serves no useful prompt either."""
PROBE_STATES = 2
"""States that it takes of a model that has them."""
_NO_POSITIONS = "layers of this model keep a state, which has no positions; K/V of this model are not moved"
_PROMPT_TOKENS = 40
_CUTS = (5, 15, 36)
"""Where the gaps of the proof begin and end."""
_TIMES_NOISE = 2.0
"""Errors that pass may be this many times what the model's own forward differs from itself by, cut in the same places. Of 120
random Qwen3-Next models 5 were above the tolerance, at 0.9 to 1.1 times of it."""
_PROBE_POSITIONS = (0, 1, 7, 130, 1_021)


@dataclass(frozen=True, slots=True)
class SelfCheckReport:
    """Proofs about a model.

    Attributes:
        forward_error: Largest logit difference to the model's own forward, relative to the largest logit.
        rope_error: Largest relative key error of the rotation over all layers; None if shifting is refused.
        refusal: Why shifted reuse is refused, or None.
    """

    forward_error: float
    rope_error: float | None
    refusal: str | None


def probe_slots(adapter: TransformersAdapter) -> int:
    """K/V slots that the self-check makes use of: `PROBE_SLOTS`, and for a model with states more, if the pool has them."""
    wanted = PROBE_SLOTS
    if adapter.states is not None:
        from kvgraft.engine.model.state_check import STATE_CHECK_TOKENS  # loaded for models that keep a state

        wanted = STATE_CHECK_TOKENS + adapter.layers.chunk_size
    return min(wanted, adapter.pool.num_slots)


def self_check(adapter: TransformersAdapter, kv_indices: np.ndarray, longest: int = 4096) -> SelfCheckReport:
    """Run the proofs and set `adapter.rope`.

    Args:
        adapter: The model.
        kv_indices: Slots to run them in, `probe_slots` of them, of every space. Of a model with states the first
            `PROBE_STATES` are taken, too, and left cleared.
        longest: Tokens of the longest sequence that is to be served.

    Raises:
        ModelError: The sparse forward does not reproduce the model's own, to rounding; nothing can be reused, not even
            prefixes.
    """
    tolerance = TOLERANCE.get(adapter.model.dtype)
    if tolerance is None:
        raise ModelError(
            f"dtype {adapter.model.dtype} is not supported; load the model in float32, bfloat16 or float16"
        )
    _check_slots(adapter, kv_indices)
    if adapter.states is None:
        forward_error = _forward_error(adapter, kv_indices)
    else:
        from kvgraft.engine.model.state_check import state_error  # loaded for models that keep a state

        forward_error = state_error(adapter, adapter.states, kv_indices)
    forward_error = max(forward_error, _length_error(adapter, kv_indices, longest, tolerance))
    if not forward_error <= tolerance:
        _require_rounding(adapter, kv_indices, forward_error, tolerance)
    if adapter.states is not None:
        return SelfCheckReport(forward_error, None, _NO_POSITIONS)
    refusal = refused_rope(adapter.model.config.get_text_config(decoder=True), adapter.model)
    if refusal is not None:
        return SelfCheckReport(forward_error, None, refusal)
    specs, error = find_rope(adapter, tolerance)
    if specs is None:
        reason = "moved keys differ from keys computed at the new position; this RoPE variant is unknown"
        return SelfCheckReport(forward_error, error, reason)
    adapter.rope = specs
    return SelfCheckReport(forward_error, error, None)


def refused_rope(config: PretrainedConfig, model: PreTrainedModel) -> str | None:
    """Say why keys of this model must not be moved, or return None."""
    if not inverse_frequencies(model):
        return "the model has no rotary position embedding (learned positions or ALiBi); keys cannot be moved"
    return refused_rope_parameters(getattr(config, "rope_parameters", None) or {})


def inverse_frequencies(model: PreTrainedModel) -> list[Tensor]:
    """Distinct tables of the model's rotary modules, float32 on the model's device."""
    tables: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            table = buffer.detach().to(model.device, torch.float32)
            if not any(table.shape == known.shape and torch.equal(table, known) for known in tables):
                tables.append(table)
    return tables


def find_rope(adapter: TransformersAdapter, tolerance: float) -> tuple[list[RopeSpec | None] | None, float]:
    """Find for each layer the rotation that explains its keys; (None, error) if a layer has none within `tolerance`."""
    positions = np.asarray(_PROBE_POSITIONS, np.int64)
    with adapter.stock() as model:
        keys = _single_token_keys(model, positions)
    specs, worst = find_rotations(keys, positions.tolist(), inverse_frequencies(adapter.model))
    return (specs, worst) if worst <= tolerance else (None, worst)


@torch.inference_mode()
def _single_token_keys(model: PreTrainedModel, positions: np.ndarray) -> list[Tensor]:
    """Keys (num_positions, num_kv_heads, head_dim) per layer of one token that is alone at each position."""
    token = torch.from_numpy(probe_tokens(model, 1)).to(model.device).expand(len(positions), 1)
    cache = cache_of(
        model(input_ids=token, position_ids=torch.from_numpy(positions[:, None]).to(model.device), use_cache=True)
    )
    return [layer.keys[:, :, 0] for layer in cache.layers]


def _check_slots(adapter: TransformersAdapter, kv_indices: np.ndarray) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = adapter.pool
    for slots in (kv_indices[:8], kv_indices[7::-1].copy()):
        place = pool.place(slots, slots)
        for layer, shape in enumerate(pool.layers):
            size = (len(slots), shape.num_kv_heads, shape.head_dim)
            keys = torch.randn(size, generator=generator).to(pool.device, pool.dtype)
            values = torch.randn(size, generator=generator).to(pool.device, pool.dtype)
            place.write(layer, keys, values)
            read_keys, read_values = place.read(layer)
            if not (torch.equal(read_keys, keys) and torch.equal(read_values, values)):
                raise ModelError(f"self-check failed: K/V of layer {layer} do not read back as written")


@torch.inference_mode()
def _forward_error(adapter: TransformersAdapter, kv_indices: np.ndarray) -> float:
    """Whole prompt, then two gaps again over zeroed K/V, each against the model's own forward."""
    token_ids = probe_tokens(adapter.model, _PROMPT_TOKENS)
    with adapter.stock() as model:
        expected = (
            model(input_ids=torch.from_numpy(token_ids).to(model.device)[None], use_cache=False).logits[0, -1].float()
        )
    everything = np.arange(_PROMPT_TOKENS)
    gaps = np.concatenate([everything[5:15], everything[-4:]])
    errors = []
    for positions in (everything, gaps):
        hidden = adapter.pool.place(kv_indices[positions], kv_indices[positions])
        for layer, shape in enumerate(adapter.pool.layers):
            zeros = torch.zeros(
                (len(positions), shape.num_kv_heads, shape.head_dim),
                dtype=adapter.pool.dtype,
                device=adapter.pool.device,
            )
            hidden.write(layer, zeros, zeros)
        rows = SequenceRows(token_ids[positions], positions, kv_indices, swa_indices=kv_indices)
        errors.append(relative_error(adapter.forward([rows])[0].logits[-1], expected))
    return max(errors)


def _require_rounding(adapter: TransformersAdapter, kv_indices: np.ndarray, error: float, tolerance: float) -> None:
    """Accept an error above `tolerance` that the model has against itself, too; raises `ModelError` otherwise."""
    dtype = adapter.model.dtype
    if dtype == torch.float32:
        noise, where = _noise_in_pieces(adapter, kv_indices), "where its prompt is computed in pieces, as kvgraft does"
    else:
        noise, where = _noise_of_rounding(adapter), "where it is computed in float32"
    allowed = tolerance if noise > MOST_NOISE[dtype] else max(tolerance, _TIMES_NOISE * noise)
    if error <= allowed:
        return
    differs = f"self-check failed: logits differ from the model's own by {error:.1e} (allowed {allowed:.1e})"
    if error <= _TIMES_NOISE * noise:
        own = "fails" if math.isinf(noise) else f"by {noise:.1e}"
        raise ModelError(f"{differs}, and its own {own} {where}; serve it without kvgraft")
    raise ModelError(
        f"{differs}, which is more than rounding; kvgraft does not understand this architecture, serve it without kvgraft "
        "and report the model type"
    )


def _noise_in_pieces(adapter: TransformersAdapter, kv_indices: np.ndarray) -> float:
    if adapter.states is None:
        prompts = [(probe_tokens(adapter.model, _PROMPT_TOKENS), list(_CUTS))]
    else:
        from kvgraft.engine.model.state_check import cut_prompts  # loaded for models that keep a state

        prompts = cut_prompts(adapter, kv_indices)
    with adapter.stock() as model:
        return own_noise(model, prompts)


def _noise_of_rounding(adapter: TransformersAdapter) -> float:
    with adapter.stock() as model:
        return own_rounding(model, probe_tokens(model, _PROMPT_TOKENS))


def _length_error(adapter: TransformersAdapter, kv_indices: np.ndarray, longest: int, tolerance: float) -> float:
    """Difference to the model's own logits of a piece of a sequence that is long enough for the second RoPE table."""
    num_tokens = min(_PROMPT_TOKENS, longest, adapter.lengths.switch or _PROMPT_TOKENS)
    token_ids = probe_tokens(adapter.model, num_tokens)
    with adapter.stock() as model:
        expected = check_lengths(model, token_ids, adapter.lengths, longest, tolerance)
    if expected is None:
        return 0.0
    state = None
    if adapter.states is not None:
        adapter.states.clear(0)
        state = 0
    rows = SequenceRows(
        token_ids, np.arange(num_tokens), kv_indices, swa_indices=kv_indices, seq_len=longest, state=state
    )
    return relative_error(adapter.forward([rows])[0].logits[-1], expected)
