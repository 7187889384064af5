"""Prove, on this rank, that grafts may be made; refuse with a reason where it cannot be proved.

Runs on scratch blocks, before the first graft: keys of a lone token at several positions show each layer's rotation (its
hidden states do not depend on the position), and a prompt computed with gaps as virtual requests must give the K/V of the
prompt computed in one run.
"""

from __future__ import annotations

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
from kvgraft.integrations.vllm.worker.drift_pass import DriftPass
from kvgraft.integrations.vllm.worker.group_kv import PagedKV
from kvgraft.integrations.vllm.worker.query_look import QueryLook
from kvgraft.integrations.vllm.worker.sparse_pass import DecoderStack, RankModel
from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable, Runs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor, nn

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV

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
        observes: What the selection policy asks to see; that it can be shown is checked too.
        corrects: Whether drift is corrected; that it is taken from where it was is checked too.

    Raises:
        IntegrationError: What could not be proved.
    """
    dtype = rank.groups[0].layers[0].cache.dtype
    tolerance = TOLERANCE.get(dtype)
    if tolerance is None:
        raise IntegrationError(f"KV cache of dtype {dtype} is not supported; use auto, float16, bfloat16 or float32")
    found = replace(rank, rope=_find_rope(rank, tolerance))
    _check_gaps(found, tolerance)
    if Observable.QUERY_ATTENTION in observes:
        _check_look(found, tolerance)
    if corrects:
        _check_drift(found, tolerance)
    if Observable.KEY_DEVIATION not in observes:
        return found
    stack = DecoderStack.of(found)
    _check_stack(found, stack, tolerance)
    return replace(found, stack=stack)


def probe_kv(rank: RankModel) -> list[Tensor]:
    """K/V of a fixed text in all layers, from position 0 on; nothing of the paged cache is touched."""
    tables, caches = _scratch_prompt(rank)
    rank.run(_probe_tokens(rank, _PROMPT_TOKENS), Runs.of(np.arange(_PROMPT_TOKENS)), tables, caches)
    return _read_all(rank, tables, caches)


def inverse_frequencies(model: nn.Module) -> list[Tensor]:
    """Distinct tables of the model's rotary modules, float32: as the module computes them, and as its angles show them."""
    tables: list[Tensor] = []
    for module in model.modules():
        candidates = []
        compute = getattr(module, "_compute_inv_freq", None)  # there is no public accessor
        if callable(compute) and hasattr(module, "base"):
            candidates.append(compute(module.base))
        cache = getattr(module, "cos_sin_cache", None)
        if isinstance(cache, torch.Tensor) and cache.ndim == 2 and len(cache) > 1:
            cos, sin = cache[1].float().chunk(2)
            candidates.append(torch.atan2(sin, cos))
        for table in (candidate.detach().to(torch.float32) for candidate in candidates):
            if not any(table.shape == known.shape and torch.equal(table.cpu(), known.cpu()) for known in tables):
                tables.append(table)
    return tables


def _find_rope(rank: RankModel, tolerance: float) -> tuple[RopeSpec | None, ...]:
    """The rotation that explains each layer's keys."""
    limit = rank.vllm_config.model_config.max_model_len
    size = max(group.block_size for group in rank.groups)
    positions = [block * size for block in _PROBED_BLOCKS if block * size < limit]
    keys = _lone_token_keys(rank, positions)
    tables = [table.to(rank.device) for table in inverse_frequencies(rank.model)]
    specs, worst = find_rotations(keys, positions, tables)
    if worst > tolerance:
        raise IntegrationError(
            f"keys moved by the model's rotary embedding are off by {worst:.1e} (allowed {tolerance:.0e}); "
            "this RoPE variant is unknown, nothing is grafted"
        )
    return tuple(specs)


def _lone_token_keys(rank: RankModel, positions: Sequence[int]) -> list[Tensor]:
    """Per layer, keys `(num_positions, num_kv_heads, head_dim)` of one token that is alone at each position."""
    caches = [[layer.scratch(1) for layer in group.layers] for group in rank.groups]
    token = np.array([_probe_tokens(rank, 1)[0]], np.int32)
    found: list[list[Tensor]] = [[] for group in rank.groups for _ in group.layers]
    for position in positions:
        # Every block is block 0, and the position is a multiple of the block size: the token lies in slot 0.
        tables = [BlockTable(np.zeros(position // g.block_size + 1, np.int32), g.block_size) for g in rank.groups]
        rank.run(token, Runs.lone(position), tables, caches)
        number = 0
        for group, group_caches in zip(rank.groups, caches, strict=True):
            for layer, cache in zip(group.layers, group_caches, strict=True):
                found[number].append(layer.read(cache, torch.zeros(1, dtype=torch.int64, device=rank.device))[0])
                number += 1
    return [torch.cat(keys) for keys in found]


def _check_gaps(rank: RankModel, tolerance: float) -> None:
    token_ids, everything = _probe_tokens(rank, _PROMPT_TOKENS), np.arange(_PROMPT_TOKENS)
    tables, caches = _scratch_prompt(rank)
    rank.run(token_ids, Runs.of(everything), tables, caches)
    expected = _read_all(rank, tables, caches)
    gaps = np.concatenate([everything[5:15], everything[20:21], everything[-4:]])
    _blank(rank, tables, caches, gaps)
    rank.run(token_ids[gaps], Runs.of(gaps), tables, caches)
    _require_equal(expected, _read_all(rank, tables, caches), tolerance, "gaps computed as virtual requests")


def _check_stack(rank: RankModel, stack: DecoderStack, tolerance: float) -> None:
    token_ids, everything = _probe_tokens(rank, _PROMPT_TOKENS), np.arange(_PROMPT_TOKENS)
    tables, caches = _scratch_prompt(rank)
    rank.run(token_ids, Runs.of(everything), tables, caches)
    expected = _read_all(rank, tables, caches)
    _blank(rank, tables, caches, everything)
    with rank.batch(Runs.of(everything), tables, caches) as on_device:
        hidden, residual = stack.run(on_device, stack.embed(token_ids, rank.device), None, 0, 1)
        stack.run(on_device, hidden, residual, 1, len(stack.layers))
    _require_equal(expected, _read_all(rank, tables, caches), tolerance, "decoder layers run one by one")


def _check_look(rank: RankModel, tolerance: float) -> None:
    """Rows whose attention is formed here must get the K/V that they get from the backend: then the weights are right."""
    token_ids, everything = _probe_tokens(rank, _PROMPT_TOKENS), np.arange(_PROMPT_TOKENS)
    tables, caches = _scratch_prompt(rank)
    homes = _scratch_homes(rank, tables, caches)
    end = _PROMPT_TOKENS // 2
    behind = everything[end:]
    look = QueryLook(rank, homes, behind, end)
    rank.run(token_ids, Runs.of(everything), tables, caches)
    for rows in np.array_split(behind, 2):
        look.run_behind(token_ids[rows], rows)
    expected = [tensor for home in homes for number in home.layers for tensor in home.place(behind).read(number)]
    actual = [tensor for home in homes for number in home.layers for tensor in look.kept_of(number)]
    _require_equal(expected, actual, tolerance, "rows run beside the cache")


def _check_drift(rank: RankModel, tolerance: float) -> None:
    """Tokens that all moved by one shift must come back to where they were when some of them are computed again."""
    sharing = [layer.name for group in rank.groups for layer in group.layers if _reads_another_layer(layer.module)]
    if sharing:
        raise IntegrationError(
            f"drift correction does not know layers with K/V of another layer, such as {sharing[0]}; use correction='none'"
        )
    token_ids, everything = _probe_tokens(rank, _PROMPT_TOKENS), np.arange(_PROMPT_TOKENS)
    tables, caches = _scratch_prompt(rank)
    homes = _scratch_homes(rank, tables, caches)
    rank.run(token_ids, Runs.of(everything), tables, caches)
    expected = _read_all(rank, tables, caches)
    moved = everything[8:-8]
    sample = moved[::4].copy()  # operations of vLLM read positions as they lie in memory
    _move(rank, homes, moved)
    run = DriftRun(sample, np.setdiff1d(moved, sample))
    correction = DriftCorrection(MeanShift(shrink=False), first_layer=0)
    with DriftPass(homes, rank.rope, sample, DriftRuns(correction, (run,))).correcting():
        rank.run(token_ids[sample], Runs.of(sample), tables, caches)
    _require_equal(expected, _read_all(rank, tables, caches), _DRIFT_ROUNDING * tolerance, "tokens corrected for drift")


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
            place.write(number, (keys.float() + by_keys).to(keys.dtype), (values.float() + by_values).to(values.dtype))


def _shift_like(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """The same for all tokens `(n, heads, head_dim)`, float32; no larger than that bfloat16 rounds as it does without it."""
    shift = torch.randn((1, *tokens.shape[1:]), generator=generator).to(tokens.device)
    return (tokens.float().abs().mean() * shift).expand(tokens.shape)


def _scratch_homes(rank: RankModel, tables: Sequence[BlockTable], caches: Sequence[Sequence[Tensor]]) -> list[GroupKV]:
    return [
        PagedKV(group, first_layer, table, group_caches, start=0)
        for group, first_layer, table, group_caches in zip(rank.groups, rank.first_layers, tables, caches, strict=True)
    ]


def _scratch_prompt(rank: RankModel) -> tuple[list[BlockTable], list[list[Tensor]]]:
    tables = [
        BlockTable(np.arange(-(-_PROMPT_TOKENS // group.block_size), dtype=np.int32), group.block_size)
        for group in rank.groups
    ]
    caches = [
        [layer.scratch(len(table.blocks)) for layer in group.layers]
        for group, table in zip(rank.groups, tables, strict=True)
    ]
    return tables, caches


def _read_all(rank: RankModel, tables: Sequence[BlockTable], caches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    everything = np.arange(_PROMPT_TOKENS)
    found: list[Tensor] = []
    for group, table, group_caches in zip(rank.groups, tables, caches, strict=True):
        slots = torch.from_numpy(table.slots(everything)).to(rank.device)
        for layer, cache in zip(group.layers, group_caches, strict=True):
            found += layer.read(cache, slots)
    return found


def _blank(
    rank: RankModel, tables: Sequence[BlockTable], caches: Sequence[Sequence[Tensor]], positions: np.ndarray
) -> None:
    for group, table, group_caches in zip(rank.groups, tables, caches, strict=True):
        slots = torch.from_numpy(table.slots(positions)).to(rank.device)
        for layer, cache in zip(group.layers, group_caches, strict=True):
            keys, values = layer.read(cache, slots)
            layer.write(cache, slots, torch.zeros_like(keys), torch.zeros_like(values))


def _require_equal(expected: Sequence[Tensor], actual: Sequence[Tensor], tolerance: float, what: str) -> None:
    error = max(relative_error(there, here) for there, here in zip(actual, expected, strict=True))
    if error > tolerance:
        raise IntegrationError(
            f"{what} differ from the whole prompt by {error:.1e} (allowed {tolerance:.0e}); nothing is grafted, "
            "please report model and attention backend"
        )


def _probe_tokens(rank: RankModel, count: int) -> np.ndarray:
    vocabulary = rank.vllm_config.model_config.get_vocab_size()
    return np.random.default_rng(7).integers(min(3, vocabulary - 1), vocabulary, count, dtype=np.int32)
