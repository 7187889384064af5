"""Drift correction while a graft's rows are computed: what `graft/drift.py` computes, from and to the request's blocks.

The seam is PyTorch's forward pre-hook on the attention modules. It fires in front of the layer's own write: the sampled
tokens' new K/V are the module's arguments, what was reused lies in the cache still, and what is written here is what the
layer attends to. So rows are better in the layers above by what was corrected below, as in the embedded engine.

Tensor-parallel ranks each estimate from the K/V heads that they hold, without a word to one another. `MeanShift` is the same
on any number of ranks, because it takes heads one by one. `KernelRidge` weighs tokens by the cosine of their K/V over all
heads that it sees: its shifts differ a little from those of one rank, and are the same every time on as many ranks.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgraft.graft.drift_layout import RunLayout
from kvgraft.integrations.vllm.worker.layer_hooks import KeptFailure, LayerInputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift_layout import DriftRun
    from kvgraft.graft.model import DriftRuns
    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV, GroupPlace


@dataclass(frozen=True, slots=True, eq=False)
class _CorrectedGroup:
    """The tokens of some runs in the layers of one group.

    Attributes:
        layout: Which of them belong together.
        rows: int64, the row of each sampled token in the pass.
        sample: Where these lie.
        rest: Where those lie that are corrected, at least one.
    """

    layout: RunLayout
    rows: Tensor
    sample: GroupPlace
    rest: GroupPlace


class DriftPass:
    """Corrects the runs that one forward pass samples, layer by layer. Of no use for a second pass.

    Only tokens of the runs are written, which lie in the request's own blocks behind its exact prefix; donors are copies
    elsewhere. All tensors of a layer are formed before the first one is written.
    """

    def __init__(
        self,
        homes: Sequence[GroupKV],
        rope: Sequence[RopeSpec | None],
        rows: NDArray[np.int64],
        drift: DriftRuns,
    ) -> None:
        """Lay out the runs.

        Args:
            homes: Where the K/V lie, one per group; what is reused of the runs must be there, as far as rows see it.
            rope: How keys rotate, layer by layer in the order of the homes.
            rows: int64, ascending positions that the pass computes.
            drift: Runs of which all sampled tokens are among `rows`.
        """
        self._homes = homes
        self._rope = rope
        self._correction = drift.correction
        device = homes[0].caches[0].device
        layout = RunLayout.of(drift.runs, device)
        sample = np.concatenate([run.sample for run in drift.runs])
        rest = np.concatenate([run.rest for run in drift.runs])
        sample_rows = torch.from_numpy(np.searchsorted(rows, sample)).to(device)
        self._groups: list[_CorrectedGroup | None] = []
        for home in homes:
            kept = np.concatenate([run.rest >= home.first_seen(_first_row(rows, run)) for run in drift.runs])
            if not kept.any():
                self._groups.append(None)
                continue
            seen = layout if kept.all() else layout.keep_rest(torch.from_numpy(kept).to(device))
            self._groups.append(_CorrectedGroup(seen, sample_rows, home.place(sample), home.place(rest[kept])))

    @contextmanager
    def correcting(self) -> Iterator[None]:
        """Correct while the block runs the model over the rows, once.

        Raises:
            Exception: What failed on this rank while the model ran; nothing was corrected behind it, and the graft is
                worth nothing.
        """
        failure, calls = KeptFailure(), count()

        def hook(group: _CorrectedGroup | None, number: int, module: object, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            # Groups are not in the model's order: which layer stands in front of which is seen as they are called.
            if next(calls) >= self._correction.first_layer and group is not None:
                failure.safely(lambda: self._correct(group, number, LayerInputs.of(module, args, kwargs)))

        with ExitStack() as stack:
            for home, group in zip(self._homes, self._groups, strict=True):
                for number, layer in zip(home.layers, home.group.layers, strict=True):
                    called = partial(hook, group, number)
                    stack.callback(layer.module.register_forward_pre_hook(called, with_kwargs=True).remove)
            yield
        failure.tell()

    def _correct(self, group: _CorrectedGroup, number: int, inputs: LayerInputs) -> None:
        reused, rest = group.sample.read(number), group.rest.read(number)
        # Rounded as they will lie in the cache: what did not move shows no movement.
        new = inputs.keys[group.rows].to(reused[0].dtype), inputs.values[group.rows].to(reused[1].dtype)
        corrected = self._correction.corrected(group.layout, new, reused, rest, self._rope[number])
        group.rest.write(number, *corrected)


def _first_row(rows: NDArray[np.int64], run: DriftRun) -> int:
    """The first row of the pass that lies in a run."""
    return int(rows[np.searchsorted(rows, min(run.sample[0], run.rest[0]))])
