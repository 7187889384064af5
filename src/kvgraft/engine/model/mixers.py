"""Layers of a model that keep a state instead of K/V, run sequence by sequence.

A *mixer* is the module that reads and writes the state of a layer in transformers' cache: gated delta net, Mamba and Mamba 2,
Kimi's delta attention, short convolution. Its code is not touched; `mixer_search` finds it. Its forward then stands behind
`MixerForward`, which gives it the rows of one sequence at a time, with a cache that holds that sequence's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from transformers import PreTrainedModel

    from kvgraft.memory.state_pool import StatePart

    OwnForward = Callable[[Tensor, Cache], Tensor]
    """A mixer's own forward: rows (batch, num_rows, width) and a cache with their states -> (batch, num_rows, width)."""


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
    kept = [
        (attribute, index, tensor)
        for attribute in ("conv_states", "recurrent_states")
        for index, tensor in (getattr(layer, attribute, None) or {}).items()
        if tensor is not None
    ]
    if not kept:
        return ()
    from kvgraft.memory.state_pool import StatePart  # loaded for models that keep a state

    return tuple(
        StatePlace(attribute, index, StatePart(tuple(tensor.shape[1:]), tensor.dtype))
        for attribute, index, tensor in kept
    )


class MixerForward:
    """Stands for the forward of a mixer. A pass without kvgraft's cache goes through unchanged."""

    def __init__(self, module: torch.nn.Module, mixer: Mixer) -> None:
        self.own: Callable[..., Tensor] = module.forward
        self._mixer = mixer

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - the mixer's own
        """Mix the rows of all sequences."""
        kwargs.pop("kvgraft_batch", None)  # mixers hand what they do not know on to kernels
        call = MixerCall(args, kwargs)
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
class MixerCall:
    """Arguments of a call of a mixer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def cache(self) -> Cache | None:
        """Transformers' cache among them, or None."""
        return next((value for value in self._values() if isinstance(value, Cache)), None)

    @property
    def hidden(self) -> Tensor:
        """The rows, (1, num_rows, width)."""
        return next(value for value in self._values() if isinstance(value, Tensor))

    @property
    def num_tensors(self) -> int:
        """How many tensors there are."""
        return sum(isinstance(value, Tensor) for value in self._values())

    def repeated(self, own: Callable[..., Tensor], hidden: Tensor, cache: Cache) -> Tensor:
        """Call `own` with other rows and another cache."""

        def replaced(value: Any) -> Any:  # noqa: ANN401 - the mixer's own
            return hidden if isinstance(value, Tensor) else cache if isinstance(value, Cache) else value

        return own(*map(replaced, self.args), **{name: replaced(value) for name, value in self.kwargs.items()})

    def _values(self) -> Iterator[Any]:
        yield from self.args
        yield from self.kwargs.values()
