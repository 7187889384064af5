"""The attention of a prompt's query, observed from outside vLLM's attention layers.

The query's rows are the last ones that a pass computes anyway: the backend attends for them, and the weights are formed a
second time, over the K/V that it has stored. Nothing is written to any cache.

The seam are the calls of the attention modules: their arguments are queries, rotated, and the keys and values of the same
rows.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from kvgraft.integrations.vllm.worker.layer_hooks import AttentionInputs, KeptFailure, calls_seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.attention_layer import AttentionLayer
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel


@dataclass(frozen=True, slots=True, eq=False)
class _LookedAtLayer:
    """One attention layer, by its number among all, and the number of its group; `rule` is for keys as they are stored."""

    number: int
    group: int
    layer: AttentionLayer
    rule: AttentionRule

    def gather(self, homes: Sequence[GroupKV], rows: NDArray[np.int64]) -> GatheredKV:
        """Copy the K/V that ascending rows see, their own included, out of the cache."""
        positions = np.arange(self.rule.first_key(int(rows[0])), int(rows[-1]) + 1)
        keys, values = homes[self.group].place(positions).read(self.number)
        return GatheredKV(torch.from_numpy(positions).to(keys.device), keys, values)


class QueryLook:
    """Sums the attention of one query over this rank's heads and layers.

    Queries are kept while the model runs (`watching`), weights are formed from them when they are needed (`observe`): forming
    them takes as long as a first token may not wait.
    """

    def __init__(self, rank: RankModel, homes: Sequence[GroupKV], query: NDArray[np.int64], num_tokens: int) -> None:
        """Observe the rows of one query.

        Args:
            rank: The model.
            homes: One per group.
            query: Ascending positions of the query's rows.
            num_tokens: Of the prompt.

        Raises:
            IntegrationError: A layer attends in a way that is not known here.
        """
        self._query = query
        self._mass = torch.zeros(num_tokens, device=rank.device)
        self._kept: list[tuple[_LookedAtLayer, NDArray[np.int64], Tensor]] = []
        self._layers = [
            _LookedAtLayer(number, group, layer, _rule_for_stored(layer))
            for group, home in enumerate(homes)
            for number, layer in zip(home.layers, home.group.layers, strict=True)
        ]

    @property
    def mass(self) -> Tensor:
        """float32 by position of the prompt: attention of observed rows, summed over layers and this rank's heads."""
        return self._mass

    @contextmanager
    def watching(self, rows: NDArray[np.int64]) -> Iterator[None]:
        """Keep the queries of those of `rows` that belong to the query, while the block runs the model over `rows`.

        Memory: of `QUERY_ROWS` rows at most, `heads * head_dim` numbers per layer, until `observe`.

        Raises:
            Exception: The first failure on this rank while the model ran.
        """
        seen = np.flatnonzero(np.isin(rows, self._query))
        if not len(seen):
            yield
            return

        with self._hooked(lambda layer, query, _: self._keep(layer, rows, seen, query)):
            yield

    def _keep(self, layer: _LookedAtLayer, rows: NDArray[np.int64], seen: NDArray[np.int64], query: Tensor) -> None:
        self._kept.append((layer, rows[seen], query[torch.from_numpy(seen).to(query.device)]))

    def observe(self, homes: Sequence[GroupKV]) -> None:
        """Add what the rows watched since the last call attend to, over the K/V in `homes` up to each."""
        kept, self._kept = self._kept, []
        for layer, rows, query in kept:
            observe(layer.rule, _query_rows(rows, query), layer.gather(homes, rows), self._mass)

    @contextmanager
    def comparing(self, homes: Sequence[GroupKV], rows: NDArray[np.int64]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield a list that takes, layer by layer, what the backend's attention gives `rows` and what is formed here.

        Raises:
            Exception: As for `watching`.
        """
        found: list[tuple[Tensor, Tensor]] = []

        def compare(layer: _LookedAtLayer, query: Tensor, output: Tensor) -> None:
            formed = attend(layer.rule, _query_rows(rows, query), layer.gather(homes, rows), self._mass, 0)
            found.append((output.reshape(formed.shape), formed * layer.layer.scales[1]))

        with self._hooked(compare):
            yield found

    @contextmanager
    def _hooked(self, look: Callable[[_LookedAtLayer, Tensor, Tensor], None]) -> Iterator[None]:
        """Call `look` with queries and output of every attention layer of the block's pass."""
        failure = KeptFailure()

        def hook(layer: _LookedAtLayer, args: Any, kwargs: Any, output: Tensor) -> None:  # noqa: ANN401
            failure.safely(lambda: look(layer, AttentionInputs.of(layer.layer.module, args, kwargs).query, output))

        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(calls_seen(layer.layer.module, after=partial(hook, layer)))
            yield
        failure.reraise()


def _rule_for_stored(layer: AttentionLayer) -> AttentionRule:
    rule = attention_rule(layer.module)
    return replace(rule, scale=rule.scale * layer.scales[0])


def _query_rows(rows: NDArray[np.int64], query: Tensor) -> QueryRows:
    return QueryRows(torch.from_numpy(rows).to(query.device), query)


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
