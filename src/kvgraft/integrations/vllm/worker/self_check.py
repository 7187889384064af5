"""Prove, on this rank, that grafts may be made; refuse with a reason where it cannot be proved.

Runs on scratch blocks, before the first graft: keys of a lone token at several positions show each layer's rotation (its
hidden states do not depend on the position), and a prompt computed with gaps as virtual requests must give the K/V of the
prompt computed in one run.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import IntegrationError
from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.drift_estimate import MeanShift
from kvgraft.graft.drift_layout import DriftRun
from kvgraft.graft.model import DriftRuns
from kvgraft.graft.rope import RopeShift, rotate_keys
from kvgraft.graft.rope_proof import TOLERANCE, find_rotations, relative_error
from kvgraft.graft.select import Observable
from kvgraft.integrations.vllm.codec.base import is_float8
from kvgraft.integrations.vllm.worker.drift_pass import DriftPass
from kvgraft.integrations.vllm.worker.group_kv import PagedKV
from kvgraft.integrations.vllm.worker.query_look import QueryLook
from kvgraft.integrations.vllm.worker.virtual_batch import RowRuns

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.decoder_stack import DecoderStack
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel

_PROMPT_TOKENS = 48
_PROBED_BLOCKS = (0, 1, 3, 10)
_DRIFT_ROUNDING = 4
"""Tokens that were moved and corrected are rounded twice more. 30 layers in bfloat16 were off by 0.65 of the usual tolerance;
K/V that are not moved back are off by five times it."""


@torch.inference_mode()
def checked(rank: RankModel, observes: Collection[Observable], *, corrects: bool = False) -> RankModel:
    """Return the model with its rotations, and with its layers one by one where these are needed.

    Args:
        rank: The model; nothing of its paged cache is touched.
        observes: Observations of the selection policy; each is checked.
        corrects: Whether drift is corrected, and the correction checked.

    Raises:
        IntegrationError: Something could not be proved; says what.
    """
    tolerance = max(_tolerance(layer.dtype) for group in rank.groups for layer in group.layers)
    found = replace(rank, rope=_find_rope(rank))
    _check_gaps(found, tolerance)
    if Observable.QUERY_ATTENTION in observes:
        _check_look(found, tolerance)
    if corrects:
        _check_drift(found, tolerance)
    if Observable.KEY_DEVIATION not in observes:
        return found
    from kvgraft.integrations.vllm.worker.decoder_stack import DecoderStack

    stack = DecoderStack.of(found.model, found.groups)
    _check_stack(found, stack, tolerance)
    return replace(found, stack=stack)


def probe_kv(rank: RankModel) -> list[Tensor]:
    """Return the K/V of a fixed text in all layers, from position 0 on; nothing of the paged cache is touched."""
    return _Scratch(rank).read()


class _Scratch:
    """A prompt of random tokens, computed whole in blocks of our own."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank
        self.token_ids, self.everything = _probe_tokens(rank, _PROMPT_TOKENS), np.arange(_PROMPT_TOKENS)
        self.homes = [
            PagedKV.scratch(group, np.arange(-(-_PROMPT_TOKENS // group.block_size), dtype=np.int32))
            for group in rank.groups
        ]
        self.run(self.everything)

    def run(self, rows: np.ndarray) -> None:
        """Compute `rows`."""
        self._rank.run(self.token_ids[rows], RowRuns.of(rows), self.homes)

    def read(self, positions: np.ndarray | None = None) -> list[Tensor]:
        """Return keys and values of all layers, by default of all positions."""
        at = self.everything if positions is None else positions
        places = [(home.place(at), home.layers) for home in self.homes]
        return [tensor for place, layers in places for number in layers for tensor in place.read(number)]

    def blank(self, positions: np.ndarray) -> None:
        """Overwrite positions with zeros."""
        for home in self.homes:
            place = home.place(positions)
            for number in home.layers:
                place.write(number, *(torch.zeros_like(tensor) for tensor in place.read(number)))


def inverse_frequencies(model: nn.Module) -> list[Tensor]:
    """Return the distinct tables of the model's rotary modules, float32, as computed by them and as read off their angles."""
    tables: list[Tensor] = []
    for module in model.modules():
        candidates = []
        compute = getattr(module, "_compute_inv_freq", None)  # there is no public accessor
        if callable(compute) and hasattr(module, "base"):
            candidates.append(compute(module.base))
            if isinstance(factor := getattr(module, "scaling_factor", None), int | float):
                candidates.append(compute(factor))  # what YaRN's takes
        # Of transformers' modules, which vLLM runs where it has none of its own; one per kind of layers, if these differ.
        candidates += [buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        cache = getattr(module, "cos_sin_cache", None)
        if isinstance(cache, torch.Tensor) and cache.ndim == 2 and len(cache) > 1:
            cos, sin = cache[1].float().chunk(2)
            candidates.append(torch.atan2(sin, cos))
        for table in (candidate.detach().to(torch.float32) for candidate in candidates):
            if not any(table.shape == known.shape and torch.equal(table.cpu(), known.cpu()) for known in tables):
                tables.append(table)
    return tables


def _find_rope(rank: RankModel) -> tuple[RopeSpec | None, ...]:
    """Find the rotation that explains each layer's keys."""
    limit = rank.vllm_config.model_config.max_model_len
    size = max(group.block_size for group in rank.groups)
    positions = [block * size for block in _PROBED_BLOCKS if block * size < limit]
    keys = _lone_token_keys(rank, positions)
    tables = [table.to(rank.device) for table in inverse_frequencies(rank.model)]
    specs, worst = find_rotations(keys, positions, tables)
    tolerance = max(_tolerance(layer_keys.dtype) for layer_keys in keys)
    if worst > tolerance:
        raise IntegrationError(
            f"keys moved by the model's rotary embedding are off by {worst:.1e} (allowed {tolerance:.0e}); "
            "this RoPE variant is unknown, nothing is grafted"
        )
    return tuple(specs)


def _lone_token_keys(rank: RankModel, positions: Sequence[int]) -> list[Tensor]:
    """Return per layer the keys `(num_positions, num_kv_heads, head_dim)` of one token that is alone at each position.

    Those of 8-bit layers are taken on their way into the cache: what is left of them there shows no rotation well.
    """
    token, first = _probe_tokens(rank, 1), np.zeros(1, np.int64)
    coarse = [layer.module for group in rank.groups for layer in group.layers if is_float8(layer.dtype)]
    found: list[list[Tensor]] = []
    for position in positions:
        # Every block is block 0, and the position is a multiple of the block size: the token lies in slot 0.
        homes = [PagedKV.scratch(group, np.zeros(position // group.block_size + 1, np.int32)) for group in rank.groups]
        with _keys_on_their_way(coarse) as passed:
            rank.run(token, RowRuns.lone(position), homes)
        found.append(
            [
                passed[layer.module] if layer.module in passed else home.place(first).read(number)[0]
                for home in homes
                for number, layer in zip(home.layers, home.group.layers, strict=True)
            ]
        )
    return [torch.cat(keys) for keys in zip(*found, strict=True)]


def _keys_on_their_way(modules: Sequence[nn.Module]) -> AbstractContextManager[dict[nn.Module, Tensor]]:
    if not modules:
        return nullcontext({})
    from kvgraft.integrations.vllm.worker.float8_layer import keys_on_their_way

    return keys_on_their_way(modules)


def _check_gaps(rank: RankModel, tolerance: float) -> None:
    prompt = _Scratch(rank)
    expected, everything = prompt.read(), prompt.everything
    gaps = np.concatenate([everything[5:15], everything[20:21], everything[-4:]])
    prompt.blank(gaps)
    prompt.run(gaps)
    _require_equal(expected, prompt.read(), tolerance, "gaps computed as virtual requests")


def _check_stack(rank: RankModel, stack: DecoderStack, tolerance: float) -> None:
    prompt = _Scratch(rank)
    expected = prompt.read()
    prompt.blank(prompt.everything)
    tokens = torch.from_numpy(prompt.token_ids).to(rank.device)
    with rank.batch(RowRuns.of(prompt.everything), prompt.homes) as on_device:
        hidden, residual = stack.run(on_device, stack.embed(tokens), None, 0, 1)
        stack.run(on_device, hidden, residual, 1, len(stack.layers))
    _require_equal(expected, prompt.read(), tolerance, "decoder layers run one by one")


def _check_look(rank: RankModel, tolerance: float) -> None:
    """Compare rows with attention formed here and by the backend: if these are the same, so are the weights."""
    prompt = _Scratch(rank)
    rows = prompt.everything[_PROMPT_TOKENS // 2 :]
    with QueryLook(rank, prompt.homes, rows, _PROMPT_TOKENS).comparing(prompt.homes, rows) as found:
        prompt.run(rows)
    expected, actual = zip(*found, strict=True)
    _require_equal(expected, actual, tolerance, "attention formed beside the backend")


def _check_drift(rank: RankModel, tolerance: float) -> None:
    """Move tokens by one shift and require that recomputing some of them moves all of them back."""
    sharing = [layer.name for group in rank.groups for layer in group.layers if _reads_another_layer(layer.module)]
    if sharing:
        raise IntegrationError(
            f"drift correction does not know layers with K/V of another layer, such as {sharing[0]}; use correction='none'"
        )
    prompt = _Scratch(rank)
    expected = prompt.read()
    moved = prompt.everything[8:-8]
    apart = max(4, -(-len(moved) // (rank.most_runs or len(moved))))
    sample = moved[::apart].copy()  # operations of vLLM read positions as they lie in memory
    _move(rank, prompt.homes, moved)
    run = DriftRun(sample, np.setdiff1d(moved, sample))
    correction = DriftCorrection(MeanShift(shrink=False), first_layer=0)
    with DriftPass(prompt.homes, rank.rope, sample, DriftRuns(correction, (run,))).correcting():
        prompt.run(sample)
    _require_equal(expected, prompt.read(), _DRIFT_ROUNDING * tolerance, "tokens corrected for drift")


def _reads_another_layer(module: object) -> bool:
    return getattr(module, "kv_sharing_target_layer_name", None) is not None


def _move(rank: RankModel, homes: Sequence[GroupKV], positions: np.ndarray) -> None:
    """Move tokens in each layer by one shift as large as its K/V mostly are, keys in the frame of position 0."""
    at = torch.from_numpy(positions).to(rank.device)
    generator = torch.Generator().manual_seed(7)
    for home in homes:
        place = home.place(positions)
        for number in home.layers:
            keys, values = place.read(number)
            by_keys, by_values = (_shift_like(tokens, generator) for tokens in (keys, values))
            rope = rank.rope[number]
            if rope is not None:
                turn = RopeShift.between(torch.zeros_like(at), at, rope.inv_freq)
                by_keys = rotate_keys(by_keys, turn, rope.pairing)
            place.write(number, keys.float() + by_keys, values.float() + by_values)


def _shift_like(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return one float32 shift for all tokens `(n, heads, head_dim)`, so small that bfloat16 rounds as without it."""
    shift = torch.randn((1, *tokens.shape[1:]), generator=generator).to(tokens.device)
    return (tokens.float().abs().mean() * shift).expand(tokens.shape)


def _require_equal(expected: Sequence[Tensor], actual: Sequence[Tensor], tolerance: float, what: str) -> None:
    error = max(_error(there, here) for there, here in zip(actual, expected, strict=True))
    if error > tolerance:
        raise IntegrationError(
            f"{what} differ from the whole prompt by {error:.1e} (allowed {tolerance:.0e}); nothing is grafted, "
            "please report model and attention backend"
        )


def _tolerance(dtype: torch.dtype) -> float:
    if is_float8(dtype):
        from kvgraft.integrations.vllm.worker.float8_layer import TOLERANCE as COARSE

        return COARSE[dtype]
    if dtype not in TOLERANCE:
        raise IntegrationError(
            f"KV cache of dtype {dtype} is not supported; use auto, float16, bfloat16, float32 or fp8"
        )
    return TOLERANCE[dtype]


def _error(actual: Tensor, expected: Tensor) -> float:
    if not is_float8(expected.dtype):
        return relative_error(actual, expected)
    from kvgraft.integrations.vllm.worker.float8_layer import rms_error

    return rms_error(actual, expected)


def _probe_tokens(rank: RankModel, count: int) -> np.ndarray:
    vocabulary = rank.vllm_config.model_config.get_vocab_size()
    return np.random.default_rng(7).integers(min(3, vocabulary - 1), vocabulary, count, dtype=np.int32)
