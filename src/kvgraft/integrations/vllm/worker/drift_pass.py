"""Drift correction while a graft's rows are computed: what `graft/drift.py` computes, from and to the request's blocks.

The seam are the calls of the attention modules, before the layer's own write: the sampled tokens' new K/V are the module's
arguments, what was reused lies in the cache still, and what is written here is what the layer attends to. So rows are better
in the layers above by what was corrected below, as in the embedded engine.

Tensor-parallel ranks each correct the K/V heads that they hold, without a word to one another. Shifts are the same on any
number of ranks where heads are taken one by one (`MeanShift`) or weights depend on positions alone (`KernelRidge` as it is by
default). One with likeness weighs tokens by the cosine of their K/V over the heads that it sees: its shifts differ a little
from those of one rank, and are the same every time on as many ranks.
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
from kvgraft.integrations.vllm.worker.layer_hooks import AttentionInputs, KeptFailure, calls_seen

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
    """The tokens of some runs in the layers of one group; `rows`, int64, are those of the sampled tokens in the pass."""

    layout: RunLayout
    rows: Tensor
    sample: GroupPlace
    rest: GroupPlace


class DriftPass:
    """Corrects the runs that one forward pass samples, layer by layer. Of no use for a second pass.

    Only tokens of the runs are written, which lie in the request's own blocks after its exact prefix; donors are copies
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
            homes: One per group, with the reused K/V of the runs as far as rows see them.
            rope: Rotation of the keys, layer by layer in the order of the homes.
            rows: int64, ascending positions that the pass computes.
            drift: Runs of which all sampled tokens are among `rows`.
        """
        self._homes = homes
        self._rope = rope
        self._correction = drift.correction
        device = homes[0].caches[0].device
        layout = RunLayout.of(drift.runs, device)
        sample, rest = drift.sample, drift.rest
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
            Exception: The first failure on this rank while the model ran; nothing was corrected after it, and the graft
                is worth nothing.
        """
        failure, calls = KeptFailure(), count()

        def hook(group: _CorrectedGroup | None, number: int, module: object, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            # Groups are not in the model's order: the order of layers shows as they are called.
            if next(calls) >= self._correction.first_layer and group is not None:
                failure.safely(lambda: self._correct(group, number, AttentionInputs.of(module, args, kwargs)))

        with ExitStack() as stack:
            for home, group in zip(self._homes, self._groups, strict=True):
                for number, layer in zip(home.layers, home.group.layers, strict=True):
                    called = partial(hook, group, number, layer.module)
                    stack.enter_context(calls_seen(layer.module, before=called))
            yield
        failure.reraise()

    def _correct(self, group: _CorrectedGroup, number: int, inputs: AttentionInputs) -> None:
        reused, rest = group.sample.read(number), group.rest.read(number)
        # Rounded as they will lie in the cache: what did not move shows no movement.
        new = group.sample.layer(number).stored(inputs.keys[group.rows], inputs.values[group.rows])
        corrected = self._correction.corrected(group.layout, new, reused, rest, self._rope[number])
        group.rest.write(number, *corrected)


def _first_row(rows: NDArray[np.int64], run: DriftRun) -> int:
    """Return the first row of the pass that lies in a run."""
    return int(rows[np.searchsorted(rows, min(run.sample[0], run.rest[0]))])
