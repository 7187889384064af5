"""The attention of a prompt's query, observed from outside vLLM's attention layers.

The query's rows are the last ones that are computed anyway. Where they lie in gaps, the backend attends for them in a pass
that is made anyway, and the weights are formed a second time beside it. Most lie after the graft, where the engine has not
been and the request may have no blocks yet: they are run once with K/V of their own, which are discarded at the end.
Nothing is written to any cache.

The seam is PyTorch's forward hook on the attention modules: their arguments are queries, rotated, and the keys and values of
the same rows; what a hook returns takes the place of the output.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgraft.errors import IntegrationError
from kvgraft.graft.row_attention import (
    AttentionRule,
    GatheredKV,
    QueryRows,
    attend,
    observe,
)
from kvgraft.integrations.vllm.worker.layer_hooks import AttentionInputs, KeptFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel


@dataclass(frozen=True, slots=True, eq=False)
class _LookedAtLayer:
    """One attention layer, by its number among all, and the home of its K/V."""

    number: int
    module: Any
    home: GroupKV
    rule: AttentionRule

    def gather(self, start: int, stop: int) -> GatheredKV:
        """Copy the K/V of positions `[start, stop)` out of the cache."""
        positions = np.arange(start, stop)
        keys, values = self.home.place(positions).read(self.number)
        return GatheredKV(torch.from_numpy(positions).to(keys.device), keys, values)


class QueryLook:
    """Sums the attention of one query over this rank's heads and layers.

    Nothing is raised inside the model: a failure is kept until its pass is over (`ranks.py`).
    """

    def __init__(self, rank: RankModel, homes: Sequence[GroupKV], query: NDArray[np.int64], end: int) -> None:
        """Observe the rows of one query.

        Args:
            rank: The model.
            homes: Homes of the K/V before `end`, with all that rows see while they are observed.
            query: Ascending positions of the query's rows; the last is the prompt's last.
            end: Positions from here on have no K/V in `homes`; all of them must be run by `run_after`, in order.

        Raises:
            IntegrationError: A layer attends in a way that is not known here.
        """
        self._rank = rank
        self._query = query
        self._end = end
        self._mass = torch.zeros(int(query[-1]) + 1, device=rank.device)
        self._layers = [
            _LookedAtLayer(number, layer.module, home, attention_rule(layer.module))
            for home in homes
            for number, layer in zip(home.layers, home.group.layers, strict=True)
        ]
        self._after: dict[int, GatheredKV] = {}
        self._failure = KeptFailure()

    @property
    def mass(self) -> Tensor:
        """float32 by position of the prompt: attention summed over rows, layers and this rank's heads."""
        return self._mass

    def kept_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the rows that `run_after` ran so far, each `(num_rows, num_kv_heads, head_dim)`."""
        kv = self._after[layer]
        return kv.keys, kv.values

    @contextmanager
    def watching(self, rows: NDArray[np.int64]) -> Iterator[None]:
        """Observe those of `rows` that belong to the query, while the block runs the model over `rows` with its backend.

        Raises:
            Exception: The first failure on this rank while the model ran.
        """
        seen = np.flatnonzero(np.isin(rows, self._query))
        if not len(seen):
            yield
            return

        def watch(layer: _LookedAtLayer, inputs: AttentionInputs) -> None:
            self._observe(layer, rows[seen], inputs.query[torch.from_numpy(seen).to(inputs.query.device)])

        with self._hooked(watch):
            yield

    def run_after(self, token_ids: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Run `rows`, the next ones from `end` on, over the K/V before them; every rank must.

        Memory: the K/V of all rows run so far, and a copy of one layer's K/V of the prompt.

        Raises:
            Exception: The first failure on this rank.
        """
        num_observed = int(np.isin(rows, self._query).sum())
        with self._hooked(lambda layer, inputs: self._attend(layer, rows, inputs, num_observed)):
            self._rank.run_aside(token_ids, rows)

    @contextmanager
    def _hooked(self, look: Callable[[_LookedAtLayer, AttentionInputs], Tensor | None]) -> Iterator[None]:
        """Call `look` in every attention layer of the block's passes; a tensor that it returns replaces the output."""

        def hook(layer: _LookedAtLayer, _module: object, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:  # noqa: ANN401
            attended = self._failure.safely(lambda: look(layer, AttentionInputs.of(layer.module, args, kwargs)))
            if self._failure.error is not None:
                return torch.zeros_like(output)
            return None if attended is None else attended.reshape(output.shape)

        with ExitStack() as stack:
            for layer in self._layers:
                handle = layer.module.register_forward_hook(partial(hook, layer), with_kwargs=True)
                stack.callback(handle.remove)
            yield
        self._failure.reraise()

    def _observe(self, layer: _LookedAtLayer, rows: NDArray[np.int64], query: Tensor) -> None:
        """Form the weights of `rows` beside the backend; it stored their K/V just now."""
        kv = layer.gather(layer.rule.first_key(int(rows[0])), int(rows[-1]) + 1)
        observe(layer.rule, QueryRows(torch.from_numpy(rows).to(query.device), query), kv, self._mass)

    def _attend(
        self, layer: _LookedAtLayer, rows: NDArray[np.int64], inputs: AttentionInputs, num_observed: int
    ) -> Tensor:
        """Attend for `rows` in the backend's place, which stores and returns nothing in such a pass."""
        positions = torch.from_numpy(rows).to(inputs.query.device)
        new = GatheredKV(positions, inputs.keys.clone(), inputs.values.clone())
        earlier = self._after.get(layer.number)
        after = self._after[layer.number] = new if earlier is None else earlier.followed_by(new)
        before = layer.gather(min(layer.rule.first_key(int(rows[0])), self._end), self._end)
        rows_seen = QueryRows(positions, inputs.query)
        return attend(layer.rule, rows_seen, before.followed_by(after), self._mass, num_observed)


def refused_look(modules: Iterable[Any]) -> str:
    """Return why the query's attention cannot be observed in some layer, or an empty text."""
    for module in modules:
        try:
            attention_rule(module)
        except IntegrationError as error:
            return str(error)
    return ""


def attention_rule(module: Any) -> AttentionRule:  # noqa: ANN401 - vLLM's Attention
    """Read how a layer attends.

    Raises:
        IntegrationError: It does so in a way that is not known here, so that a query's attention cannot be observed.
    """
    impl = module.impl
    strange = {
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "K/V of another layer": getattr(module, "kv_sharing_target_layer_name", None) is not None,
        "no scale that could be read": not isinstance(getattr(impl, "scale", None), float),
    }
    found = [what for what, holds in strange.items() if holds]
    if found:
        raise IntegrationError(
            f"policies that observe the query's attention do not know layers with {', '.join(found)}; "
            "use selection='first_k'"
        )
    softcap = getattr(impl, "logits_soft_cap", None) or 0.0
    return AttentionRule(impl.scale, int(getattr(module, "sliding_window", None) or 0), float(softcap))
