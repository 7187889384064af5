"""Find the modules of a model that keep a state, and how they go on from one, by watching a pass of its own.

No family is named here. What a mixer keeps is read off the cache; which module it is, and by which argument it gets its
rows, is seen in the pass. Loaded for models that keep a state.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvgraft.engine.model.mixers import Mixer, MixerCall, cache_with, parts_of, state_layer
from kvgraft.errors import ModelError
from kvgraft.graft.rope_proof import TOLERANCE, relative_error
from kvgraft.model_cache import cache_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from kvgraft.engine.model.mixers import StatePlace

_WATCHED_TOKENS = 3
_RUN_TOKENS = 5
_CHUNK_SIZE = 64
"""Of mixers that do not say: what transformers' chunked linear attention takes."""
_FAINT = 10.0
"""A state that changes a mixer's result by less than this many tolerances does not show whether it was used."""


def find_mixers(model: PreTrainedModel, states: Sequence[tuple[int, tuple[StatePlace, ...]]]) -> tuple[Mixer, ...]:
    """Find the modules that keep `states`, (number of the layer, parts) each, and how they go on from one.

    Raises:
        ModelError: A state is kept by no module alone, or by one that takes or makes other things than rows.
    """
    watch = _watched(model)
    mixers: list[Mixer] = []
    takes_runs: dict[type, bool] = {}
    for number, places in states:
        name = watch.name_of(number)
        module = model.get_submodule(name)
        mixer = Mixer(
            number,
            name,
            places,
            sum(len(known.places) for known in mixers),
            chunk_size=getattr(module, "chunk_size", _CHUNK_SIZE),
        )
        if type(module) not in takes_runs:
            takes_runs[type(module)] = _takes_runs(module, mixer, watch.calls[name], model)
        mixers.append(replace(mixer, takes_runs=takes_runs[type(module)]))
    return tuple(mixers)


@dataclass(slots=True)
class _Watch:
    """The modules of a pass that touched states."""

    model_type: str
    stack: list[str] = field(default_factory=list)
    names: dict[int, set[str]] = field(default_factory=dict)
    calls: dict[str, MixerCall] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)

    def note(self, layer: int) -> None:
        """Say that the module that runs now touched the state of a layer."""
        self.names.setdefault(layer, set()).add(self.stack[-1] if self.stack else "")

    def name_of(self, layer: int) -> str:
        """Return the module that keeps the state of a layer."""
        names = self.names.get(layer, set())
        name = next(iter(names), "")
        if len(names) != 1 or not name or sum(name in others for others in self.names.values()) != 1:
            raise ModelError(
                f"layer {layer} of model type {self.model_type!r} keeps a state that no module of its own reads and writes; "
                "choose another model"
            )
        result = self.results[name]
        if self.calls[name].num_tensors != 1 or not isinstance(result, Tensor) or result.ndim != 3:
            raise ModelError(
                f"layer {layer} of model type {self.model_type!r} keeps a state in a module that does not take and make rows "
                "alone; choose another model"
            )
        return name


class _WatchedCache(DynamicCache):
    """transformers' own cache, which notes the module that updates a state."""

    def __init__(self, model: PreTrainedModel, watch: _Watch) -> None:
        super().__init__(config=model.config)
        self._watch = watch

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        self._watch.note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        self._watch.note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


@torch.inference_mode()
def _watched(model: PreTrainedModel) -> _Watch:
    """Run a pass of the model's own and note which modules touch states, with which arguments and results."""
    watch = _Watch(model.config.model_type)
    tokens = torch.zeros((1, _WATCHED_TOKENS), dtype=torch.int64, device=model.device)
    with _hooked(model, watch):
        model(input_ids=tokens, use_cache=True, **cache_argument(model, _WatchedCache(model, watch)))
    return watch


@contextmanager
def _hooked(model: PreTrainedModel, watch: _Watch) -> Iterator[None]:
    def enter(name: str) -> Callable[..., None]:
        def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watch.stack.append(name)
            watch.calls[name] = MixerCall(args, kwargs)

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(_: object, __: object, result: object) -> None:
            watch.stack.pop()
            watch.results[name] = result

        return hook

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def _takes_runs(module: torch.nn.Module, mixer: Mixer, call: MixerCall, model: PreTrainedModel) -> bool:
    """Ask a mixer for a few rows after a state, at once and row by row: whether several rows at once go on from it.

    Raises:
        ModelError: They do, and come out otherwise than row by row.
    """
    probe = _RunProbe(module, mixer, call, model)
    lengths = [1] * _RUN_TOKENS
    at_once, by_row = probe.run([_RUN_TOKENS]), probe.run(lengths)
    difference = max(relative_error(left, right) for left, right in zip(at_once, by_row, strict=True))
    is_recurrent = any(place.is_recurrent for place in mixer.places)
    effect = relative_error(probe.run([_RUN_TOKENS], is_cleared=True)[0], at_once[0]) if is_recurrent else math.inf
    tolerance = TOLERANCE.get(call.hidden.dtype, 0.0)
    if difference <= tolerance:
        return effect > _FAINT * tolerance
    if effect > tolerance:
        raise ModelError(
            f"layer {mixer.layer} of model type {model.config.model_type!r} gives other results for single tokens than for "
            f"several at once (by {difference:.0e}), so its prefixes would not be exact; choose another model"
        )
    return False


class _RunProbe:
    """A few random rows after a random state of one mixer."""

    def __init__(self, module: torch.nn.Module, mixer: Mixer, call: MixerCall, model: PreTrainedModel) -> None:
        self._module, self._mixer, self._call = module, mixer, call
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(model.device, dtype)

        self._hidden = random(1, _RUN_TOKENS, call.hidden.shape[-1], dtype=call.hidden.dtype)
        self._state = [random(1, *place.part.shape, dtype=place.part.dtype) for place in mixer.places]

    def run(self, lengths: list[int], *, is_cleared: bool = False) -> list[Tensor]:
        """Return the rows' results, computed in pieces of `lengths`, and the parts of the state after them.

        Args:
            lengths: Of the pieces.
            is_cleared: Begin with recurrent parts of zeros.
        """
        parts = [
            torch.zeros_like(part) if is_cleared and place.is_recurrent else part.clone()
            for place, part in zip(self._mixer.places, self._state, strict=True)
        ]
        layer = state_layer(self._mixer, parts)
        cache = cache_with(self._mixer, layer)
        pieces = self._hidden.split(lengths, dim=1)
        results = [self._call.repeated(self._module.forward, rows, cache) for rows in pieces]
        return [torch.cat(results, dim=1), *parts_of(self._mixer, layer)]
