"""Any transformers decoder as a `ModelAdapter`: packed rows of several sequences, K/V in slots.

Uses transformers' public registries only: an attention function and a mask function under the name `kvgraft`, and a cache
object with layers that scatter new K/V into the pool. No model code is touched and no kernel is needed.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvgraft.engine.attention import (
    AttentionChoice,
    AttentionHeads,
    BatchAttention,
    LayerQuery,
    choose_attention,
)
from kvgraft.engine.model.drift_pass import BatchDrift
from kvgraft.engine.model.layers import ModelLayers, cached_layers, layer_window, unsupported_attention
from kvgraft.engine.model.masks import marked_mask, marked_masks, require_known, require_mask
from kvgraft.engine.model.mixers import NoLayer, StatefulCache, unwrap, wrap
from kvgraft.engine.model.rope_lengths import RopeLengths
from kvgraft.engine.model.slot_plan import SlotPlan, build_pool, build_states
from kvgraft.errors import ConfigError, ModelError
from kvgraft.graft.model import PassAbandonedError, SequenceOutput, SequenceRows
from kvgraft.memory.pool import SlotPool
from kvgraft.model_cache import cache_argument
from kvgraft.windows import widest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

    from kvgraft.engine.attention import AttentionBackend
    from kvgraft.engine.model.masks import MaskRule
    from kvgraft.engine.model.mixers import Mixer, StatePlace
    from kvgraft.engine.model.state_pass import StatePass
    from kvgraft.graft.rope import RopeSpec
    from kvgraft.memory.hybrid_pool import HybridSlotPool
    from kvgraft.memory.pool import KVPlace
    from kvgraft.memory.state_pool import StatePool

ATTENTION_NAME = "kvgraft"
_FEW_STATES = 8
"""States of a model with layers that keep one, without a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class _PackedBatch:
    """One forward pass: where each row's K/V goes, and which keys each row sees.

    Rows of the pass beyond `num_rows` belong to no sequence: their K/V are not kept, and they see nothing. A look ends at
    `deviation_layer`; its slots keep what they hold; 0 is no look. Layers are numbered as in the pool, and `numbers` says
    which layers of the model they are.
    """

    target: KVPlace
    attention: BatchAttention
    num_rows: int
    drift: BatchDrift
    deviation_layer: int
    is_abandoned: Callable[[], bool] | None
    numbers: Sequence[int]
    states: StatePass | None

    def number_of(self, layer: int) -> int:
        """Number, among the attention layers, of a layer of the model."""
        return self.numbers.index(layer)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take the K/V of the rows, (num_rows, num_kv_heads, head_dim), and correct the tokens beside them.

        Raises:
            _LookEndsError: The keys are those that a look is for.
            PassAbandonedError: The pass is not to go on.
        """
        if self.is_abandoned is not None and self.is_abandoned():
            raise PassAbandonedError
        if self.deviation_layer and layer == self.deviation_layer:
            reused = self.target.read(layer)[0]
            raise _LookEndsError((keys.float() - reused.float()).square().sum((1, 2)))
        corrected = self.drift.corrected(layer, keys, values)
        self.target.write(layer, keys, values)
        for kv in corrected:
            kv.write()

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """Attention of a layer: (heads, rows, dim) like the query."""
        spare = query.query.shape[1] - self.num_rows
        if not spare:
            return self.attention.attend(layer, query)
        mixed = self.attention.attend(layer, replace(query, query=query.query[:, : self.num_rows]))
        return torch.nn.functional.pad(mixed, (0, 0, 0, spare))


class _LookEndsError(Exception):
    """A look has seen its layer: the way out of the model, which runs all layers or none."""

    def __init__(self, deviation: Tensor) -> None:
        super().__init__()
        self.deviation = deviation


class TransformersAdapter:
    """A `ModelAdapter` over a transformers decoder and a pool of slots. Not thread-safe.

    Attributes:
        layers: What its layers keep.
        pool: K/V of all attention layers; window layers may have slots of their own.
        states: States of sequences in layers that keep one; None for a model without such layers.
        attention: The attention backend and why it was chosen.
        rope: Per layer how keys rotate; set by the self-check, None while shifting is refused.
        lengths: At which lengths of sequences the model's angles change.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: ModelLayers,
        pool: SlotPool | HybridSlotPool,
        attention: AttentionChoice,
        states: StatePool | None = None,
    ) -> None:
        self._model = model
        self.layers = layers
        self._numbers = layers.numbers or tuple(range(len(layers.shapes)))
        config = model.config.get_text_config(decoder=True)
        self.lengths = RopeLengths.of_model(config)
        # Llama 4 takes a row's position for this from its number in the pass and the length of the cache.
        self._scales_by_length = bool(getattr(config, "attn_temperature_tuning", False))
        self.pool = pool
        self.states = states
        self.attention = attention
        self.rope: Sequence[RopeSpec | None] | None = None

    @classmethod
    def create(
        cls,
        model: PreTrainedModel,
        *,
        num_slots: int = 0,
        kv_bytes: int = 0,
        attention: str = "auto",
        num_states: int = _FEW_STATES,
    ) -> TransformersAdapter:
        """Take `model` over and allocate `num_slots`, or what `kv_bytes` hold, in one space for all layers.

        A model with layers that keep a state gets `num_states` of them beside.

        Raises:
            ConfigError: There is no attention backend of that name.
            ModelError: See `take_over`.
        """
        layers = take_over(model)
        plan = replace(SlotPlan.uniform(layers, model.dtype, num_slots, kv_bytes), num_states=num_states)
        return cls.over(model, layers, plan, attention)

    @classmethod
    def over(
        cls, model: PreTrainedModel, layers: ModelLayers, plan: SlotPlan, attention: str = "auto"
    ) -> TransformersAdapter:
        """Allocate slots and states as planned for a model that `take_over` described.

        Raises:
            ConfigError: There is no attention backend of that name, or what is planned does not fit.
        """
        pool = build_pool(layers, plan, model.dtype, model.device)
        num_heads = model.config.get_text_config(decoder=True).num_attention_heads
        heads = AttentionHeads(layers.shapes[0], num_heads, layers.has_sinks)
        choice = choose_attention(attention, heads, model.dtype, pool.device)
        return cls(model, layers, pool, choice, build_states(layers, plan, pool.device))

    @property
    def num_layers(self) -> int:
        """Attention layers of the model, each with K/V in the pool; layers that keep a state are not among them."""
        return len(self.pool.layers)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model; its attention and its mixers are kvgraft's outside of `stock`."""
        return self._model

    @contextmanager
    def stock(self, implementation: str = "eager") -> Iterator[PreTrainedModel]:
        """Lend the model with transformers' own attention and mixers, for comparisons."""
        self._model.set_attn_implementation(implementation)
        unwrap(self._model)
        try:
            yield self._model
        finally:
            wrap(self._model, self.layers.mixers)
            self._model.set_attn_implementation(ATTENTION_NAME)

    def forward(self, batch: Sequence[SequenceRows]) -> list[SequenceOutput]:
        """Compute `batch`; writes the K/V of its rows into their slots, and moves their states on at the very end.

        One pass, or several where sequences lie on both sides of a length at which the model's angles change, and where
        some only look at a layer. A look moves no state.

        Raises:
            ConfigError: A look is for a layer that the model does not have.
            CorruptCacheError: Rows are not the next ones of their state.
            PassAbandonedError: See `ModelAdapter.forward`.
        """
        kinds = [
            (self.lengths.is_long(rows.seq_len or int(rows.positions[-1]) + 1), rows.deviation_layer) for rows in batch
        ]
        outputs: dict[int, SequenceOutput] = {}
        moved: list[StatePass] = []
        for kind in sorted(set(kinds)):
            members = [index for index, own in enumerate(kinds) if own == kind]
            is_long, deviation_layer = kind
            part = [batch[i] for i in members]
            states = None if self.states is None else _state_pass(part, self.states)
            found = self._forward_pass(part, states, deviation_layer, is_long=is_long)
            outputs.update(zip(members, found, strict=True))
            if states is not None and not deviation_layer:
                moved.append(states)
        for states in moved:
            states.commit()
        return [outputs[index] for index in range(len(batch))]

    @torch.inference_mode()
    def _forward_pass(
        self, batch: Sequence[SequenceRows], states: StatePass | None, deviation_layer: int, *, is_long: bool
    ) -> list[SequenceOutput]:
        if deviation_layer >= self.num_layers:
            raise ConfigError(
                f"layer {deviation_layer} cannot be looked at: this model has {self.num_layers}; choose a lower one"
            )
        packed = self._lay_out(batch, states, deviation_layer)
        token_ids = np.concatenate([rows.token_ids for rows in batch])
        positions = np.concatenate([rows.positions for rows in batch])
        switch = self.lengths.switch
        if is_long and switch is not None and positions.max() < switch:
            # A piece of a long sequence: a spare row at the first long position makes transformers take its table.
            token_ids, positions = np.append(token_ids, token_ids[-1]), np.append(positions, switch)
        device = self.pool.device
        ahead = torch.from_numpy(positions - np.arange(len(positions))).to(device) if self._scales_by_length else 0
        try:
            output = self._model(
                input_ids=torch.from_numpy(token_ids).to(device)[None],
                position_ids=torch.from_numpy(positions).to(device)[None],
                **cache_argument(self._model, _PoolCache(packed, ahead)),
                use_cache=True,
                logits_to_keep=torch.from_numpy(_rows_with_logits(batch)).to(device),
                kvgraft_batch=packed,
            )
        except _LookEndsError as look:
            parts = look.deviation.split([len(rows.positions) for rows in batch])
            return [SequenceOutput(part.new_empty(0, 0), None, part) for part in parts]
        logits = output.logits[0].float().split([rows.num_logits for rows in batch])
        return [SequenceOutput(part, mass) for part, mass in zip(logits, packed.attention.masses, strict=True)]

    def _lay_out(self, batch: Sequence[SequenceRows], states: StatePass | None, deviation_layer: int) -> _PackedBatch:
        target = np.concatenate([rows.kv_indices[rows.positions] for rows in batch])
        backend, pool = self.attention.backend, self.pool
        place: KVPlace
        attention: BatchAttention
        if isinstance(pool, SlotPool):
            place, attention = pool.place(target), backend.plan(batch, pool)
        else:
            windows = [rows.swa_indices[rows.positions] for rows in batch if rows.swa_indices is not None]
            place, attention = pool.place(target, np.concatenate(windows)), _hybrid_batch(batch, pool, backend)
        return _PackedBatch(
            place,
            attention,
            len(target),
            BatchDrift(batch, pool, self.rope),
            deviation_layer,
            batch[0].is_abandoned if len(batch) == 1 else None,
            self._numbers,
            states,
        )


def take_over(model: PreTrainedModel) -> ModelLayers:
    """Put `model` into evaluation mode with kvgraft's attention and mixers, and describe its layers.

    Raises:
        ModelError: It keeps other things than slots of keys and values and states, or it does not use transformers'
            attention interface.
    """
    unsupported = unsupported_attention(model)
    if unsupported is not None:
        raise ModelError(f"{unsupported}; choose another model")
    model.eval()
    model.requires_grad_(False)
    if model.config._attn_implementation == ATTENTION_NAME:  # another engine runs the model, too
        model.set_attn_implementation("eager")
    unwrap(model)
    cached = cached_layers(model)
    mixers = _mixers(model, cached.states)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            f"model type {model.config.model_type!r} does not use transformers' attention interface; choose another model"
        )
    probe = _probed(model)
    asked = probe.queries
    has_sinks = any(query.sinks is not None for query in asked.values())
    if not has_sinks and any(name.endswith("sinks") for name, _ in model.named_parameters()):
        raise ModelError(
            f"model type {model.config.model_type!r} keeps its attention sinks to itself; choose another model"
        )
    foreign = sorted(asked.keys() - cached.shapes.keys())
    if foreign:
        raise ModelError(
            f"layers of model type {model.config.model_type!r} share attention under the number {foreign[0]}, where no K/V "
            "are kept; choose another model"
        )
    windows = tuple(asked[layer].window if layer in asked else None for layer in cached.shapes)
    try:
        widest(windows)
    except ConfigError as error:
        raise ModelError(f"{error}; choose another model") from error
    probe.require_masks(model.config.get_text_config(decoder=True))
    wrap(model, mixers)
    numbers = tuple(cached.shapes) if mixers else ()
    return ModelLayers(tuple(cached.shapes.values()), windows, has_sinks, numbers, mixers)


def _mixers(model: PreTrainedModel, states: dict[int, tuple[StatePlace, ...]]) -> tuple[Mixer, ...]:
    """Find what keeps the states of layers, by their numbers; nothing of that is imported for a model without any."""
    if not states:
        return ()
    from kvgraft.engine.model.mixer_search import find_mixers

    return find_mixers(model, sorted(states.items()))


def _hybrid_batch(batch: Sequence[SequenceRows], pool: HybridSlotPool, backend: AttentionBackend) -> BatchAttention:
    """Lay out a pass of a model with windows; what does so is imported with the first one, the self-check's."""
    from kvgraft.engine.attention.hybrid import HybridBatch

    return HybridBatch(batch, pool, backend)


def _state_pass(batch: Sequence[SequenceRows], states: StatePool) -> StatePass:
    """Take the states of a pass; what does so is imported with the first one, the self-check's."""
    from kvgraft.engine.model.state_pass import StatePass

    return StatePass(batch, states)


@torch.inference_mode()
def _probed(model: PreTrainedModel) -> _QueryProbe:
    """Return what each layer asks of attention, which is what counts; configurations name windows and sinks in many ways."""
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with marked_masks() as rules:
        probe = _QueryProbe(rules)
        model(input_ids=token, use_cache=False, kvgraft_batch=probe)
    return probe


class _QueryProbe:
    """Stands in for a forward pass and notes what each layer asks."""

    def __init__(self, rules: list[MaskRule]) -> None:
        self.queries: dict[int, LayerQuery] = {}
        self.masks: dict[int, Tensor | None] = {}
        self._rules = rules

    @staticmethod
    def number_of(layer: int) -> int:
        """Layers are asked about by their number in the model."""
        return layer

    def require_masks(self, config: PretrainedConfig) -> None:
        """Raise `ModelError` if rows of a layer see other keys than its window says."""
        for layer, query in self.queries.items():
            require_mask(config, layer, self.masks[layer], self._rules, query.window)

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """Note the question; the result is of the right shape and means nothing."""
        self.queries[layer] = query
        return torch.zeros_like(query.query)


def _rows_with_logits(batch: Sequence[SequenceRows]) -> NDArray[np.int64]:
    """Numbers, in the packed batch, of the rows with logits that are asked for."""
    ends = np.cumsum([len(rows.positions) for rows in batch])
    return np.concatenate([np.arange(end - rows.num_logits, end) for rows, end in zip(batch, ends, strict=True)])


class _PoolLayer(CacheLayerMixin):
    """One layer of the pool as transformers sees it: `update` scatters, attention reads the pool itself."""

    is_sliding = False

    def __init__(self, layer: int, batch: _PackedBatch, ahead: Tensor | int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._batch, self._ahead, self.is_initialized = layer, batch, ahead, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool is allocated already."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the rows' K/V, (1, num_kv_heads, num_rows, head_dim), into their slots."""
        keys, values = (states[0, :, : self._batch.num_rows].transpose(0, 1) for states in (key_states, value_states))
        self._batch.write(self._layer, keys, values)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes of a mask that is not built."""
        return query_length, 0

    def get_seq_length(self) -> Tensor | int:  # type: ignore[override]
        """Distance of each row's position from its number in the pass; 0 for models that take positions as given."""
        return self._ahead

    def get_max_length(self) -> int:
        """Unbounded as far as transformers is concerned."""
        return -1


class _PoolCache(StatefulCache):
    """All layers of the model; those without K/V are empty places here, and their states are in `states`."""

    def __init__(self, batch: _PackedBatch, ahead: Tensor | int) -> None:
        layers: list[Any] = [NoLayer() for _ in range(batch.numbers[-1] + 1)]
        for number, layer in enumerate(batch.numbers):
            layers[layer] = _PoolLayer(number, batch, ahead)
        super().__init__(layers=layers)
        self.states = batch.states


def _attend(  # noqa: PLR0913, PLR0917 - transformers' interface
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    kvgraft_batch: _PackedBatch | _QueryProbe | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention function in transformers' interface: (1, heads, rows, dim) -> (1, rows, heads, dim)."""
    if kvgraft_batch is None:
        raise ModelError("this model type does not pass arguments on to its attention function; choose another model")
    layer = module.layer_idx
    assert isinstance(layer, int)
    number = kvgraft_batch.number_of(layer)
    if isinstance(kvgraft_batch, _QueryProbe):
        kvgraft_batch.masks[layer], attention_mask = attention_mask, None
    require_known(type(module).__name__, attention_mask, options)
    window = layer_window(
        getattr(module, "config", None), layer, sliding_window or getattr(module, "sliding_window", None)
    )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mixed = kvgraft_batch.attend(number, LayerQuery(query[0], scale, window, softcap, s_aux))
    return mixed.transpose(0, 1)[None].contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, marked_mask)
