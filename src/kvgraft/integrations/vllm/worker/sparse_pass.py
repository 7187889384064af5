"""Passes of this rank's model over chosen positions, through all layers or some."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.integrations.vllm.worker.layers import caches_bound
from kvgraft.integrations.vllm.worker.ranks import together
from kvgraft.integrations.vllm.worker.virtual_batch import RowRuns, virtual_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from vllm.config import VllmConfig

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.decoder_stack import DecoderStack
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.layers import LayerGroup


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """The model of this rank and its K/V.

    Attributes:
        rope: Rotation of each layer's keys, group by group; None for a layer without RoPE.
        stack: The layers one by one, where the selection policy needs them.
    """

    vllm_config: VllmConfig
    model: nn.Module
    groups: tuple[LayerGroup, ...]
    rope: tuple[RopeSpec | None, ...] = ()
    stack: DecoderStack | None = None

    @property
    def device(self) -> torch.device:
        """Device of the caches."""
        return self.groups[0].layers[0].cache.device

    @property
    def most_runs(self) -> int | None:
        """Runs that one pass may have: FlashInfer's builder has room for `max_num_seqs` requests; None for any number."""
        builders = [builder for group in self.groups for builder, _ in group.builders]
        limits = [builder.max_num_reqs for builder in builders if hasattr(builder, "max_num_reqs")]
        return min(limits, default=None)

    @property
    def most_rows(self) -> int:
        """Rows that one pass may have: backends make room for a step's tokens and no more."""
        return int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    @contextmanager
    def batch(self, runs: RowRuns, homes: Sequence[GroupKV]) -> Iterator[Tensor]:
        """Prepare a pass over `runs` with K/V in `homes`, one per group; yield the positions on the device.

        What follows within may be a collective operation: all ranks have prepared then.
        """
        layers = [layer for group in self.groups for layer in group.layers]
        caches = [cache for home in homes for cache in home.caches]
        with caches_bound(layers, caches), ExitStack() as stack:
            tables = [home.table for home in homes]
            context = virtual_batch(self.vllm_config, self.groups, tables, runs, self.device)
            yield together(lambda: stack.enter_context(context))

    def run(self, token_ids: NDArray[np.int32], runs: RowRuns, homes: Sequence[GroupKV]) -> Tensor:
        """Compute and store the K/V of `runs` in all layers; `token_ids` are those of their positions. Samples nothing.

        Returns:
            The last layer's output of the last row, (1, width).
        """
        tokens = torch.from_numpy(token_ids).to(self.device)  # what may fail comes before the vote
        with self.batch(runs, homes) as on_device:
            hidden: Tensor = self.model(input_ids=tokens, positions=on_device)
        return hidden[-1:].clone()  # not a view, which would keep the other rows

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return the logits (vocab_size,) of a row that `run` has returned; all ranks must ask, and some get None."""
        found: Tensor | None = self.model.compute_logits(hidden)  # type: ignore[operator]
        return None if found is None else found[0]
