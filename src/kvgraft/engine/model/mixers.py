"""Layers of a model that keep a state instead of K/V, found by watching a pass of its own, and run sequence by sequence.

A *mixer* is the module that reads and writes the state of a layer in transformers' cache: gated delta net, Mamba and Mamba 2,
Kimi's delta attention, short convolution. Its code is not touched and no family is named here. What a mixer keeps is read
off the cache; which module it is, and by which argument it gets its rows, is seen in the pass. Its forward then stands
behind `MixerForward`, which gives it the rows of one sequence at a time, with a cache that holds that sequence's state.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache

from kvgraft.errors import ModelError
from kvgraft.fidelity import cache_argument
from kvgraft.graft.rope_proof import TOLERANCE, relative_error
from kvgraft.memory.state_pool import StatePart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    OwnForward = Callable[[Tensor, Cache], Tensor]
    """A mixer's own forward: rows (batch, num_rows, width) and a cache with their states -> (batch, num_rows, width)."""

_WATCHED_TOKENS = 3
_RUN_TOKENS = 5
_CHUNK_SIZE = 64
"""Of mixers that do not say: what transformers' chunked linear attention takes."""
_FAINT = 10.0
"""A state that changes a mixer's result by less than this many tolerances does not show whether it was used."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where transformers' cache keeps one part of a layer's state: `layer.<attribute>[<index>]`."""

    attribute: str
    index: int
    part: StatePart

    @property
    def is_recurrent(self) -> bool:
        """Whether it is a recurrent state, and not the last inputs of a convolution."""
        return self.attribute == "recurrent_states"


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module that keeps a state.

    Attributes:
        layer: Number of its layer in the model.
        name: Of the module.
        places: Parts of its state.
        first_part: Number of the first of them among the parts of all mixers.
        takes_runs: Whether several rows at once go on from a state. A selective scan (Mamba) begins every run of rows from
            nothing and goes on only row by row.
        chunk_size: Tokens that it computes at once, filled up at the end of a run. States may be kept anywhere else, too;
            runs cut at its multiples cost the least.
    """

    layer: int
    name: str
    places: tuple[StatePlace, ...]
    first_part: int
    takes_runs: bool = True
    chunk_size: int = 64


class PassStates(Protocol):
    """States of the sequences of one forward pass."""

    def mix(self, mixer: Mixer, own: OwnForward, hidden: Tensor) -> Tensor:
        """Return what `mixer` makes of the rows of all sequences, (1, rows, width)."""


class NoLayer:
    """A place in a cache, of a layer that keeps nothing there."""


class StatefulCache(Cache):
    """A cache by which mixers know a pass of kvgraft's."""

    states: PassStates | None = None


def state_layer(mixer: Mixer, parts: Sequence[Tensor] | None) -> Any:  # noqa: ANN401 - no class of old transformers
    """Make a layer of transformers' cache with a state, which passes change in place.

    Args:
        mixer: Of the layer.
        parts: Each (batch, ...); None before the first token.
    """
    number = 1 + max(place.index for place in mixer.places)
    layer: Any = cache_utils.LinearAttentionLayer(number_of_states=number)
    for place, tensor in zip(mixer.places, parts or (), strict=parts is not None):
        getattr(layer, place.attribute)[place.index] = tensor
        getattr(layer, f"is_{place.attribute}_initialized")[place.index] = True
        layer.has_previous_state[place.index] = True
        layer.dtype, layer.device = tensor.dtype, tensor.device
        if place.attribute == "conv_states":
            layer.conv_kernel_size[place.index] = tensor.shape[-1]
    return layer


def cache_with(mixer: Mixer, layer: Any) -> Cache:  # noqa: ANN401 - see above
    """Make a cache with `layer` at the mixer's number and nothing at lower ones."""
    layers: list[Any] = [*[NoLayer()] * mixer.layer, layer]
    return Cache(layers=layers)


def parts_of(mixer: Mixer, layer: Any) -> list[Tensor]:  # noqa: ANN401 - see above
    """Return the state that a layer of transformers' cache holds now."""
    return [getattr(layer, place.attribute)[place.index] for place in mixer.places]


def state_places(layer: object) -> tuple[StatePlace, ...]:
    """Return the parts of the state in a layer of transformers' cache, for one sequence; none for another kind of layer."""
    places = []
    for attribute in ("conv_states", "recurrent_states"):
        for index, tensor in (getattr(layer, attribute, None) or {}).items():
            if tensor is not None:
                places.append(StatePlace(attribute, index, StatePart(tuple(tensor.shape[1:]), tensor.dtype)))
    return tuple(places)


def find_mixers(model: PreTrainedModel, states: Sequence[tuple[int, tuple[StatePlace, ...]]]) -> tuple[Mixer, ...]:
    """Find the modules that keep `states`, (number of the layer, parts) each, and how they go on from one.

    Raises:
        ModelError: A state is kept by no module alone, or by one that takes or makes other things than rows.
    """
    if not states:
        return ()
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


class MixerForward:
    """Stands for the forward of a mixer. A pass without kvgraft's cache goes through unchanged."""

    def __init__(self, module: torch.nn.Module, mixer: Mixer) -> None:
        self.own: Callable[..., Tensor] = module.forward
        self._mixer = mixer

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - the mixer's own
        """Mix the rows of all sequences."""
        kwargs.pop("kvgraft_batch", None)  # mixers hand what they do not know on to kernels
        call = _Call(args, kwargs)
        states = call.cache.states if isinstance(call.cache, StatefulCache) else None
        if states is None:
            return self.own(*args, **kwargs)
        return states.mix(self._mixer, lambda hidden, cache: call.repeated(self.own, hidden, cache), call.hidden)


def wrap(model: PreTrainedModel, mixers: Sequence[Mixer]) -> None:
    """Put the mixers of `model` behind `MixerForward`."""
    for mixer in mixers:
        module = model.get_submodule(mixer.name)
        module.forward = MixerForward(module, mixer)


def unwrap(model: PreTrainedModel) -> None:
    """Give all modules of `model` their own forward back."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, MixerForward):
            del module.forward
            if module.forward != forward.own:  # it had been replaced before, for instance by a hook
                module.forward = forward.own


@dataclass(slots=True)
class _Call:
    """Arguments of a mixer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def cache(self) -> Cache | None:
        return next((value for value in self._values() if isinstance(value, Cache)), None)

    @property
    def hidden(self) -> Tensor:
        return next(value for value in self._values() if isinstance(value, Tensor))

    @property
    def num_tensors(self) -> int:
        return sum(isinstance(value, Tensor) for value in self._values())

    def repeated(self, own: Callable[..., Tensor], hidden: Tensor, cache: Cache) -> Tensor:
        """Call `own` with other rows and another cache."""

        def replaced(value: Any) -> Any:  # noqa: ANN401 - the mixer's own
            return hidden if isinstance(value, Tensor) else cache if isinstance(value, Cache) else value

        return own(*map(replaced, self.args), **{name: replaced(value) for name, value in self.kwargs.items()})

    def _values(self) -> Iterator[Any]:
        yield from self.args
        yield from self.kwargs.values()


@dataclass(slots=True)
class _Watch:
    """The modules of a pass that touched states."""

    model_type: str
    stack: list[str] = field(default_factory=list)
    names: dict[int, set[str]] = field(default_factory=dict)
    calls: dict[str, _Call] = field(default_factory=dict)
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
            watch.calls[name] = _Call(args, kwargs)

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
def _takes_runs(module: torch.nn.Module, mixer: Mixer, call: _Call, model: PreTrainedModel) -> bool:
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

    def __init__(self, module: torch.nn.Module, mixer: Mixer, call: _Call, model: PreTrainedModel) -> None:
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
